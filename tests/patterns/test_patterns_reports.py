"""Checking updates: every reason to refuse one, with its words, and what a sound one comes to."""

from __future__ import annotations

import pytest
import torch

from edgefl.parameters import BufferSpec, Layout, Vector
from edgefl.parameters.compress import CompressConfig
from edgefl.patterns.reports import Intake, is_finite

LAYOUT = Layout.of_shapes([("a", (4,))], [BufferSpec("m", (1,), torch.float32)])


class Stub:
    """As much of a node as an intake asks for."""

    compress = CompressConfig()

    def __init__(self):
        self.notes = []

    def note(self, kind, detail):
        self.notes.append((kind, detail))


def vector(*values, buffer=0.0):
    return Vector(LAYOUT, torch.tensor(values), (torch.tensor([buffer]),))


ZERO = vector(0.0, 0.0, 0.0, 0.0)
OTHER = Vector(Layout.of_shapes([("b", (4,))]), torch.zeros(4))


def test_a_sound_model_comes_through_as_it_is():
    node = Stub()
    intake, y = Intake(node, 10.0), vector(3.0, 4.0, 0.0, 0.0)
    assert intake.model(1, y, ZERO) is y and intake.change(1, y, LAYOUT) is y
    assert intake.refused == 0 and node.notes == []


@pytest.mark.parametrize(
    ("sent", "weight", "why"),
    [
        (vector(30.0, 40.0, 0.0, 0.0), 1, "its norm 50 is above 10"),
        (vector(torch.inf, 0.0, 0.0, 0.0), 1, "it is not finite"),
        (vector(torch.nan, 0.0, 0.0, 0.0), 1, "it is not finite"),
        (vector(1.0, 0.0, 0.0, 0.0, buffer=torch.nan), 1, "it is not finite"),
        (vector(1.0, 0.0, 0.0, 0.0), 0, "its weight 0 is not above 0"),
        (vector(1.0, 0.0, 0.0, 0.0), float("nan"), "its weight nan is not above 0"),
        (OTHER, 1, "it has another layout than the model"),
    ],
)
def test_each_reason_has_its_words(sent, weight, why):
    node = Stub()
    intake = Intake(node, 10.0)
    assert intake.model(7, sent, ZERO, weight) is None and intake.change(7, sent, LAYOUT, weight) is None
    assert node.notes == [("refused", f"the update of node 7: {why}")] * 2 and intake.refused == 2


def test_the_norm_is_that_of_the_change():
    far = vector(1e3, 1e3, 0.0, 0.0)
    assert Intake(Stub(), 10.0).model(1, far, far) is far
    assert Intake(Stub(), 10.0).model(1, far, ZERO) is None


def test_finite():
    assert is_finite(ZERO) and not is_finite(vector(0.0, 0.0, torch.inf, 0.0))
    assert not is_finite(vector(0.0, 0.0, 0.0, 0.0, buffer=torch.nan))
