"""Node, operations, Method: all that a method author needs to read."""

from edgefl.messages.base import Back, Gone, Message
from edgefl.nodes.handles import Task, Transfer
from edgefl.nodes.method import Check, Faults, Method, MethodConfig, Program
from edgefl.nodes.node import FleetView, Node
from edgefl.nodes.operations import Op

__all__ = [
    "Back", "Check", "Faults", "FleetView", "Gone", "Message", "Method", "MethodConfig",
    "Node", "Op", "Program", "Task", "Transfer",
]  # fmt: skip
