"""Forward passes of stages whose values are kept until the backward pass comes for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from edgefl.parameters import Vector

if TYPE_CHECKING:
    from edgefl.learning.learner import Scratch
    from edgefl.learning.model import Model


@dataclass(eq=False)
class Bench:
    """Scratch memory that holds these parameters while `num_open` passes through it are kept."""

    scratch: Scratch
    parameters: Vector | None = None
    num_open: int = 0


@dataclass(frozen=True, eq=False)
class Tape:
    """One kept pass: what went in, the input on the device, and the output that the graph hangs on."""

    bench: Bench
    parameters: Vector
    x: Tensor
    inputs: Tensor
    output: Tensor


class Tapes:
    """The latest forward passes, found by the very stage, parameters and input that went in.

    A pass that is not here is made again, with the same result: what is kept saves time and decides nothing.
    make_scratch: new scratch memory for a stage. most: passes kept; beyond that the oldest is given up.
    """

    def __init__(self, make_scratch: Callable[[Model], Scratch], most: int = 64) -> None:
        self._make_scratch, self._most = make_scratch, most
        self._benches: dict[Model, list[Bench]] = {}
        self._tapes: dict[tuple[int, int, int], Tape] = {}

    def forward(self, stage: Model, parameters: Vector, x: Tensor) -> Tensor:
        """The stage's output at x, on the CPU; the pass is kept.

        The gradient at the input is provided for where the stage is not the model's first.
        """
        tape = self._record(stage, parameters, x, input_gradient=stage.first > 0)
        key = (id(stage), id(parameters), id(x))
        self._close(self._tapes.pop(key, None))
        self._tapes[key] = tape  # it holds what the ids are of, so they stay theirs
        if len(self._tapes) > self._most:
            self._close(self._tapes.pop(next(iter(self._tapes))))
        return tape.output.detach().to("cpu").contiguous()

    def take(self, stage: Model, parameters: Vector, x: Tensor, input_gradient: bool) -> Tape:
        """The kept pass, or a new one; `done` gives its memory back."""
        tape = self._tapes.pop((id(stage), id(parameters), id(x)), None)
        if tape is not None and (tape.inputs.requires_grad or not input_gradient):
            return tape
        self._close(tape)
        return self._record(stage, parameters, x, input_gradient)

    def done(self, tape: Tape) -> None:
        """The backward pass has been made."""
        self._close(tape)

    def _close(self, tape: Tape | None) -> None:
        if tape is not None:
            tape.bench.num_open -= 1

    def _record(self, stage: Model, parameters: Vector, x: Tensor, input_gradient: bool) -> Tape:
        bench = self._bench(stage, parameters)
        inputs = bench.scratch.inputs(x.detach())
        inputs.requires_grad_(input_gradient and inputs.is_floating_point())
        tape = Tape(bench, parameters, x, inputs, bench.scratch.forward(inputs, training=True))
        bench.num_open += 1
        return tape

    def _bench(self, stage: Model, parameters: Vector) -> Bench:
        """One that holds these parameters already, else one that is free. A pass moves buffers, so that
        a stage with buffers has a bench per pass."""
        benches = self._benches.setdefault(stage, [])
        if not stage.layout.buffers:
            for bench in benches:
                if bench.num_open and bench.parameters is parameters:
                    return bench
        for bench in benches:
            if not bench.num_open:
                break
        else:
            bench = Bench(self._make_scratch(stage))
            benches.append(bench)
        bench.scratch.load(parameters)
        bench.parameters = parameters
        return bench
