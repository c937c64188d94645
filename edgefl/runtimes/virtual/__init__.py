"""Virtual time: a discrete-event kernel under the programs."""

from edgefl.runtimes.virtual.runtime import VirtualRuntime

__all__ = ["VirtualRuntime"]
