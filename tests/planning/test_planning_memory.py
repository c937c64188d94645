"""What each node of a split method needs in memory, and who is refused for want of it."""

from __future__ import annotations

import pytest
from small import small_plan

from edgefl.devices import DeviceProfile
from edgefl.errors import ConfigError
from edgefl.planning.memory import refuse_beyond_memory

MODEL = {"name": "mlp", "hidden": (32, 16)}
FRONT, REAR = 64 * 32 + 32, 32 * 16 + 16 + 16 * 10 + 10
"""Parameters of the first block and of the other two."""
SPLIT = [
    "split-learning",
    "splitfed-v1",
    "splitfed-v2",
    "parallel-split",
    "edgesplit",
    "hsfl",
    "hsfl-layerwise",
]


def board(memory_bytes: int) -> DeviceProfile:
    return DeviceProfile(name="board", compute_flops=1e9, memory_bytes_per_s=1e15, memory_bytes=memory_bytes)


def needs(method: str, clients: int = 3, **settings):
    plan = small_plan(method, clients, model=MODEL, train={"batch_size": 8}, **settings)
    return plan, plan.method.memory(plan)


@pytest.mark.parametrize("method", SPLIT)
def test_every_node_has_a_figure_and_a_server_that_lacks_memory_is_refused_by_name(method):
    plan, found = needs(method, profiles=[board(1 << 12), *[board(1 << 30)] * 3])
    assert sorted(found) == [0, 1, 2, 3] and all(size > 0 for size in found.values())
    assert found[0] >= plan.learner.model.counts.parameter_bytes
    with pytest.raises(ConfigError) as refused:
        refuse_beyond_memory(plan, found)
    words = f"server 0 (board) needs {found[0] / 1e6:,.1f} MB for its part of the model and has 0.0 MB"
    assert str(refused.value) == f"fleet.roles.server = 'board': {words}"


def test_a_rear_for_each_client_costs_a_rear_for_each_client():
    own, one = needs("splitfed-v1")[1], needs("splitfed-v2")[1]
    assert own[0] - one[0] == 2 * 4 * REAR and own[1] == one[1]
    more = needs("splitfed-v1", 5)[1]
    assert more[0] - own[0] == 2 * 4 * REAR


def test_momentum_doubles_what_is_kept_of_a_rear():
    plain = needs("splitfed-v2")[1]
    plan = small_plan("splitfed-v2", 3, model=MODEL, train={"batch_size": 8, "momentum": 0.9})
    momentum = plan.method.memory(plan)
    assert momentum[0] - plain[0] == 4 * REAR and momentum[1] - plain[1] == 4 * FRONT


def test_a_union_of_batches_is_held_at_once():
    union, one = needs("parallel-split")[1], needs("splitfed-v2")[1]
    values = needs("parallel-split")[0].learner.model.stage(1, 3).counts.saved_bytes
    assert union[0] - one[0] == pytest.approx(2 * 2 * 8 * values, rel=0.01)


@pytest.mark.parametrize("method", ["dapple", "gpipe"])
def test_a_stage_needs_its_versions_and_its_open_micro_batches(method):
    """Two versions, the gradient and its sum; GPipe holds all four micro-batches, DAPPLE two and one."""
    policy = {} if method == "gpipe" else {"policy": "PA"}
    plan, found = needs(method, stages=((1, 1), (3, 1)), **policy)
    saved = [plan.learner.model.stage(a, b).counts.saved_bytes for a, b in ((0, 1), (1, 3))]
    open_ones = (4, 4) if method == "gpipe" else (2, 1)
    assert found[0] == 4 * 4 * FRONT + open_ones[0] * 2 * saved[0]
    assert found[1] == 4 * 4 * REAR + open_ones[1] * 2 * saved[1]
    assert found[2] == 0


def test_copies_of_stages_cost_their_keepers_three_versions_and_everybody_one_more():
    settings = {"stages": ((1, 1), (3, 1)), "micro_batches": 2, "model": MODEL}
    plain, kept = (
        small_plan("gpipe", 3, train={"batch_size": 8, "momentum": 0.9}, copy_every=every, **settings)
        for every in (None, 5)
    )
    before, after = plain.method.memory(plain), kept.method.memory(kept)
    more = [after[i] - before[i] for i in range(3)]
    assert more == [2 * 4 * (FRONT + 3 * REAR), 2 * 4 * (REAR + 3 * FRONT), 0]
