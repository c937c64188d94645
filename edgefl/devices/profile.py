"""What a device can do: the figures that drive its virtual twin and its share of the work."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from edgefl.devices.kernels import Kernels
from edgefl.sources import Source


class DeviceProfile(BaseModel):
    """One device. A figure that a device does not offer is None, never a guess.

    Upper bounds lie far above any device of today; they catch a slipped unit or exponent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    """Catalog name, e.g. "raspberry-pi-4b"."""
    title: str = ""
    """As people call it, e.g. "Raspberry Pi 4 Model B (4 GB)"."""
    compute_flops: float = Field(gt=0, le=1e16)
    """Sustained float32 operations per second in training (a multiply-add counts two)."""
    memory_bytes_per_s: float = Field(gt=0, le=1e15)
    """Sustained memory bandwidth."""
    memory_bytes: int = Field(gt=0, le=10**15)
    """Memory that training may use."""
    step_overhead_s: float = Field(default=0.0, ge=0, le=60)
    """Fixed cost of one training step (interpreter, dispatch), in seconds."""
    lanes: int = Field(default=1, ge=1, le=4096)
    """Work items that the processor carries out side by side, each at full speed."""
    idle_w: float | None = Field(default=None, ge=0, le=1e5)
    """Power at rest, in watts."""
    busy_w: float | None = Field(default=None, ge=0, le=1e5)
    """Power while computing, in watts."""
    radio_j_per_byte: float | None = Field(default=None, ge=0, le=1)
    """Energy of sending or receiving one byte, in joules."""
    step_times_s: dict[str, dict[int, float]] = Field(default_factory=dict)
    """Measured seconds of one training step, by model name and batch size; used as they are where present."""
    kernels: Kernels | None = None
    """Measured times of the operators that training is made of: they predict any model's step."""
    machine: dict[str, Any] = Field(default_factory=dict)
    """What the profiler found beside: board, system, rates, load, and what is not offered. For people."""
    source: str = ""
    """Where the figures come from, in one line."""
    sources: tuple[Source, ...] = ()
    """Where it can be read, figure by figure."""

    @model_validator(mode="after")
    def _consistent(self) -> DeviceProfile:
        if self.idle_w is not None and self.busy_w is not None and self.busy_w < self.idle_w:
            raise ValueError(f"busy_w = {self.busy_w:g} should be at least idle_w = {self.idle_w:g}")
        for model, times in self.step_times_s.items():
            for batch_size, seconds in times.items():
                if batch_size < 1 or seconds <= 0:
                    found = f"batch size {batch_size} in {seconds:g} s"
                    raise ValueError(f"step_times_s.{model}: {found}, both should be positive")
        return self
