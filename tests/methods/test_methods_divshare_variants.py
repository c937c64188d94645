"""The authors' variants that DivShare is compared with: pushes and answers, and queues that only grow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methods_reference import INSTANT, Wrapped, batches, run, scatter, sgd, with_programs
from small import small_plan
from toy import Watcher, access

from edgefl.errors import ConfigError
from edgefl.methods.decentralized.divshare_adpsgd import Push, average, peer
from edgefl.nodes.plan import Crash, FaultPlan
from edgefl.parameters import Layout, Vector

VARIANTS = ["divshare-adpsgd", "divshare-swift"]


@pytest.mark.parametrize("method", VARIANTS)
def test_one_node_is_sgd(method):
    plan = small_plan(method, 1, rounds=5)
    assert torch.equal(run(plan).results[0].values, sgd(plan, batches(plan, 0, range(10))))


def test_the_swift_variant_is_divshare_with_whole_models_while_queues_empty_in_time():
    config = {"rounds": 5, "recipients": 3, "access": INSTANT}
    whole = run(small_plan("divshare", 6, fragment_fraction=1.0, **config))
    variant = run(small_plan("divshare-swift", 6, **config))
    assert all(whole.results[i].equal(variant.results[i]) for i in range(6))
    assert whole.traffic.table == variant.traffic.table


@pytest.mark.parametrize("method", VARIANTS)
def test_on_a_thin_uplink_the_queue_grows_for_ever(method):
    """Each iteration adds 4 models (answers included) and about 1 leaves; DivShare's queue stays as it is."""
    probe = small_plan(method, 5, rounds=1, recipients=4)
    phase_s = run(probe).time_s
    thin = access(4 * probe.learner.model.layout.size / phase_s, 1e12)
    plan = small_plan(method, 5, rounds=12, recipients=4, access=[thin] + [access(1e12)] * 4)
    watcher = Watcher()
    run(plan, watcher)
    queued = [m["queued"] for node, _, m in watcher.metrics if node == 0]
    assert np.all(np.diff(queued) >= 0) and queued[-1] >= 12 * 2


def test_each_push_is_answered_once():
    """J/2 pushes per iteration, each answered once; those of the last iteration end with the program."""
    plan, log = small_plan("divshare-adpsgd", 4, rounds=6, recipients=3, access=INSTANT), []

    class Listening(Wrapped):
        def send(self, to, message, **more):
            log.append((self.inner.id, to, message))
            return self.inner.send(to, message, **more)

    async def listening(node):
        return await peer(Listening(node))

    run(with_programs(plan, peer=listening))
    first = [(a, b) for a, b, m in log if m.first]
    answers = [(b, a) for a, b, m in log if not m.first]
    assert len(first) == 4 * 5 and sorted(answers) == sorted(first)


def test_a_model_that_has_not_trained_yet_answers_with_the_common_start():
    plan = small_plan("divshare-adpsgd", 3, rounds=2, recipients=2, access=INSTANT, slowdowns=[1, 1, 50])
    x0, answers = plan.learner.model.init(), []

    class Listening(Wrapped):
        def send(self, to, message, **more):
            if not message.first and self.inner.id == 2:
                answers.append(message)
            return self.inner.send(to, message, **more)

    async def listening(node):
        return await peer(Listening(node))

    run(with_programs(plan, peer=listening))
    assert answers and torch.equal(answers[0].values, x0.values)


def test_the_average_takes_each_peers_newest_model_once():
    layout = Layout.of_shapes([("x", (5,))])
    x, a, b = (scatter(5, k) for k in range(3))
    mean = average(Vector(layout, x), {7: a, 3: b})
    assert torch.allclose(mean.values, (x + a + b) / 3, atol=1e-6)
    assert average(mean, {}) is mean


def test_a_push_is_one_model():
    plan = small_plan("divshare-adpsgd", 5, rounds=4, access=INSTANT, recipients=4)
    outcome = run(plan)
    assert outcome.traffic.payload_bytes == outcome.traffic.messages * 4 * plan.learner.model.layout.size
    assert {kind for _, _, kind in outcome.traffic.table} == {Push.__name__}


@pytest.mark.parametrize("method", ["divshare", *VARIANTS])
def test_a_peer_that_returns_goes_on_from_its_last_iteration(method):
    phase_s = run(small_plan(method, 4, rounds=1, recipients=2)).time_s
    crash = FaultPlan(crashes=(Crash(2, at_s=3.5 * phase_s, down_s=2 * phase_s),), detect_s=phase_s)
    watcher = Watcher()
    outcome = run(small_plan(method, 4, rounds=8, recipients=2, faults=crash), watcher)
    own = [step for node, _, step, _ in watcher.models if node == 2]
    assert outcome.status == "finished" and own == list(range(1, 9))


@pytest.mark.parametrize("method", VARIANTS)
def test_too_many_recipients_are_refused(method):
    plan = small_plan(method, 4, recipients=4)
    with pytest.raises(ConfigError) as caught:
        plan.method.prepare(plan)
    assert str(caught.value) == f"method.{method}.recipients = 4: at most 3 with 4 nodes"


def test_two_nodes_push_and_answer_one_model_each():
    plan = small_plan("divshare-adpsgd", 2, rounds=4, recipients=2, access=INSTANT)
    plan.method.prepare(plan)
    assert run(plan).traffic.messages == 2 * 2 * 3  # those of the last iteration end with the program
    with pytest.raises(ConfigError, match="recipients = 3: at most 2 with 2 nodes"):
        plan.method.prepare(small_plan("divshare-adpsgd", 2, recipients=3))
