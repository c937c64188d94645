"""The [data] table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class PartitionConfig(BaseModel):
    """The [data.partition] table. A plain name stands for a table with that name alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = "iid"
    """iid, dirichlet, shards, quantity or owner."""
    alpha: float = Field(default=0.5, gt=0)
    """dirichlet, quantity: concentration; the smaller, the more unlike the nodes."""
    shards_per_node: int = Field(default=2, gt=0)
    """shards: pieces of the label-sorted data that each node gets."""
    min_examples: int = Field(default=1, ge=1)
    """Least examples of a node."""
    allow_reuse: bool = False
    """iid, dirichlet: with fewer examples than the nodes need, draw each node's with replacement."""
    reuse_examples: int = Field(default=32, gt=0)
    """Examples of each node where they are drawn with replacement."""


class DataConfig(BaseModel):
    """The [data] table: a data set and how it is dealt to the nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = "digits"
    """digits, fashion-mnist, synthetic, text or folder."""
    partition: PartitionConfig = PartitionConfig()
    num_train: int | None = Field(default=None, gt=0)
    """Keep so many training examples, drawn once and for all; all where not given."""
    num_test: int | None = Field(default=None, gt=0)
    """Keep so many test examples."""
    folder: Path | None = None
    """fashion-mnist: where the four .gz files lie. folder: an .npz file, or a folder that holds one."""
    num_owners: int = Field(default=30, gt=0)
    """synthetic, text: natural owners (devices, speakers)."""
    examples_per_owner: int | None = Field(default=None, ge=10)
    """synthetic, text: the same for all owners, instead of sizes that follow a law."""
    alpha: float = Field(default=1.0, ge=0)
    """synthetic: variance of the mean of an owner's model."""
    beta: float = Field(default=1.0, ge=0)
    """synthetic: variance of the owners' input means."""
    model_spread: float | None = Field(default=None, ge=0)
    """synthetic: variance of the owners' models around a common one; each drawn alone where not given."""
    num_features: int = Field(default=60, gt=0)
    """synthetic: inputs of an example."""
    num_classes: int = Field(default=10, ge=2)
    """synthetic: labels."""
    length: int = Field(default=32, gt=0)
    """text: characters of an example."""
    data_seed: int = 0
    """synthetic, text: what the data set is generated from; runs of different seeds share the data."""

    @field_validator("partition", mode="before")
    @classmethod
    def _plain_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
