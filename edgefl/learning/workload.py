"""How much work a node does: the default is [train]'s; planning may override it per node."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TrainConfig(BaseModel):
    """The [train] table: how local training is done, by every method."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = Field(default=0.1, gt=0)
    schedule: Literal["constant", "cosine", "step"] = "constant"
    """How the rate falls with the round: not, half a cosine to 0, or by `decay` every `decay_rounds`."""
    schedule_rounds: int | None = Field(default=None, gt=0)
    """Rounds until a cosine ends; [stop] rounds where that is given."""
    decay: float = Field(default=0.1, gt=0, le=1)
    decay_rounds: int = Field(default=30, gt=0)
    warmup_rounds: int = Field(default=0, ge=0)
    """Rounds in which the rate rises linearly to its full value."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    clip_norm: float | None = Field(default=None, gt=0)
    """Most Euclidean norm of a step's gradient."""
    batch_size: int = Field(default=16, gt=0)
    local_steps: int | None = Field(default=None, gt=0)
    """Mini-batches in one round of local training."""
    local_epochs: int | None = Field(default=None, gt=0)
    """Passes over the local data in one round; one where neither is given."""

    @model_validator(mode="after")
    def _one_measure(self) -> TrainConfig:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("give local_steps or local_epochs, not both")
        return self


class Workload(BaseModel):
    """One node's share of the work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int = Field(default=16, gt=0)
    steps: int | None = Field(default=None, gt=0)
    """Mini-batches per round; where None, `epochs` passes over the local data."""
    epochs: int = Field(default=1, gt=0)
    rate_factor: float = Field(default=1.0, gt=0)
    """What local training multiplies [train]'s learning rate by."""
    width: float | None = Field(default=None, gt=0, le=1)
    """Share of every hidden layer's units that is trained here (sub-models); None: it was not planned."""
    cut: int | None = Field(default=None, gt=0)
    """Number of blocks that stay on the device (split learning)."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the processor."""
    rate_bytes_per_s: float | None = Field(default=None, gt=0)
    """Reserved sending rate."""

    @classmethod
    def of(cls, train: TrainConfig) -> Workload:
        return cls(batch_size=train.batch_size, steps=train.local_steps, epochs=train.local_epochs or 1)

    def num_steps(self, num_examples: int) -> int:
        """Mini-batches in one round for a node with so many examples."""
        return self.steps or self.epochs * -(-num_examples // self.batch_size)
