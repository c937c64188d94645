"""Data sets, partitions, and a node's local data."""

from edgefl.data.config import DataConfig, PartitionConfig
from edgefl.data.dataset import Dataset, Task
from edgefl.data.load import load_dataset
from edgefl.data.local import Batch, LocalData, WeightedData
from edgefl.data.partition import label_table, partition

__all__ = [
    "Batch",
    "DataConfig",
    "Dataset",
    "LocalData",
    "PartitionConfig",
    "Task",
    "WeightedData",
    "label_table",
    "load_dataset",
    "partition",
]
