"""The profiler: what this machine is, and how fast it does what training asks of it."""

from edgefl.devices.profiler.facts import Facts, load_average, read_facts
from edgefl.devices.profiler.timing import Sample, measure, summarised

__all__ = ["Facts", "Sample", "load_average", "measure", "read_facts", "summarised"]
