"""Data sets, partitions, and a node's local data."""

from edgefl.data.dataset import Dataset, Task
from edgefl.data.local import Batch, LocalData

__all__ = ["Batch", "Dataset", "LocalData", "Task"]
