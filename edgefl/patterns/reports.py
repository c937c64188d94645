"""What a server makes of what clients send: opened, checked, and refused by name where it must be.

An update is somebody's claim. One whose values are not finite, that has another shape than the model, that
would move the model by more than `max_update_norm`, or that claims a weight that no client can have changes
nothing: it is counted, and a line in the run's events names its sender and the reason. So the global model
stays finite. Repeats and reports of an earlier round never come this far: the message classes say so
(`once_by`, `stale_by`), and the run's outcome counts them.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from edgefl.nodes import Check, Message, Node
from edgefl.parameters import Layout, Vector
from edgefl.patterns.compression import Sent, opened

MOST_NORM = 1e6
"""Default of max_update_norm: far above any step of training, far below what overflows."""


class Reported(Protocol):
    """What a report of local training holds."""

    @property
    def sender(self) -> int: ...
    @property
    def parameters(self) -> Sent: ...
    @property
    def num_examples(self) -> int: ...
    @property
    def num_steps(self) -> int: ...


class Intake:
    """Opens and checks updates. refused: how many so far."""

    def __init__(self, node: Node, max_update_norm: float) -> None:
        self._node, self._most = node, max_update_norm
        self._base: tuple[Vector | None, float] = (None, 0.0)
        """The latest base, and its norm."""
        self.refused = 0

    def report(self, base: Vector, r: Reported) -> Vector | None:
        """The model that a report carries, its weight the number of examples; None: refused."""
        if r.num_steps < 1:
            self.refuse(r.sender, f"it claims {r.num_steps} local steps")
            return None
        return self.model(r.sender, r.parameters, base, r.num_examples)

    def model(self, sender: int, sent: Sent, base: Vector, weight: float = 1.0) -> Vector | None:
        """A model that was sent as it is, or as its packed change from `base`; None: refused.

        weight: what the sender claims for it.
        """
        if not isinstance(sent, Vector):
            change = self.change(sender, sent, base.layout, weight)
            return None if change is None else base + change
        if sent.layout is not base.layout and sent.layout != base.layout:
            self.refuse(sender, "it has another layout than the model")
            return None
        if self._base[0] is not base:
            self._base = base, base.norm()
        # The change's norm is at most that of both together; this is mostly all that need be known of it.
        norm = sent.norm() + self._base[1]
        if not norm <= self._most / 2:
            norm = _exact_norm(sent - base)
        return sent if self._sound(sender, norm, sent, weight) else None

    def change(self, sender: int, sent: Sent, layout: Layout, weight: float = 1.0) -> Vector | None:
        """A change, as it is or packed; None: refused."""
        try:
            found = opened(self._node, sent, layout)
        except ValueError as error:
            self.refuse(sender, str(error))
            return None
        return found if self._sound(sender, _exact_norm(found), found, weight) else None

    def _sound(self, sender: int, norm: float, sent: Vector, weight: float) -> bool:
        if not math.isfinite(norm) or (sent.buffers and not _are_finite(sent.buffers)):
            self.refuse(sender, "it is not finite")
        elif norm > self._most:
            self.refuse(sender, f"its norm {norm:.3g} is above {self._most:.3g}")
        elif not (math.isfinite(weight) and weight > 0):
            self.refuse(sender, f"its weight {weight} is not above 0")
        else:
            return True
        return False

    def refuse(self, sender: int, why: str) -> None:
        """Count and name an update that changes nothing."""
        self.refused += 1
        self._node.note("refused", f"the update of node {sender}: {why}")


def _are_finite(buffers: tuple[torch.Tensor, ...]) -> bool:
    return all(bool(b.isfinite().all()) for b in buffers)


def is_finite(vector: Vector) -> bool:
    """Whether all values and buffers are numbers."""
    # A finite sum says so, at a tenth of the price; one that is not may be an overflow.
    tensors = (vector.values, *vector.buffers)
    return all(math.isfinite(float(t.sum())) or bool(t.isfinite().all()) for t in tensors)


def _exact_norm(change: Vector) -> float:
    """The norm of its values, in float64: no square of a float32 overflows."""
    return float(torch.linalg.vector_norm(change.values, dtype=torch.float64))


def _final_is_finite(outcome: Any) -> bool | str:
    final = outcome.results.get(0)
    return True if final is None or is_finite(final) else "the server's last model is not finite"


def _all_are_finite(outcome: Any) -> bool | str:
    for node, model in outcome.results.items():
        if isinstance(model, Vector) and not is_finite(model):
            return f"the last model of node {node} is not finite"
    return True


def _all_are_equal(outcome: Any) -> bool | str:
    models = {i: x for i, x in outcome.results.items() if isinstance(x, Vector)}
    first = min(models, default=0)
    for node, x in models.items():
        if not torch.equal(x.values, models[first].values):
            return f"nodes {first} and {node} end with different models"
    return True


ALL_EQUAL = Check("all end with the same model, bit for bit", _all_are_equal)
ALL_FINITE = Check("all models stay finite", _all_are_finite)
FINITE = Check("the global model stays finite", _final_is_finite)


def answers(question: type[Message], answer: type[Message]) -> Check:
    """An invariant: nobody sends more answers of a kind than it was asked for, by a question or a model."""

    def holds(outcome: Any) -> bool | str:
        table = outcome.traffic.table
        for (k, to, kind), row in table.items():
            asked = table.get((to, k, question.__name__), (0,))[0]
            if kind == answer.__name__ and row[0] > asked:
                return (
                    f"node {k} sent {row[0]} {kind} to node {to}, which sent it {asked} {question.__name__}"
                )
        return True

    return Check(f"a {answer.__name__} answers a {question.__name__}", holds)
