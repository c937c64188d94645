"""SCAFFOLD: its control variates sum up, whoever reports, and lead to the optimum that FedAvg misses."""

from __future__ import annotations

import pytest
import torch
from methods_reference import Wrapped, batches, gradient, rate, run, start, with_programs
from quadratics import distance, optimum, quadratic_plan
from small import run_small, small_plan
from toy import FAST, Watcher

from edgefl.data import Batch
from edgefl.errors import ConfigError
from edgefl.methods.federated import scaffold
from edgefl.nodes.plan import Crash, FaultPlan

UNEVEN = {"name": "dirichlet", "alpha": 0.5}
WHOLE = {"batch_size": 2000, "local_steps": 1}


class Ear(Wrapped):
    """A node whose saves are kept in a shared dictionary."""

    def __init__(self, inner, kept):
        super().__init__(inner)
        self.kept = kept

    def save(self, **state):
        self.kept[self.inner.id] = state
        return self.inner.save(**state)


def listened(plan):
    """A run, and what every node saved last."""
    kept = {}

    async def server(node):
        return await scaffold.server(Ear(node, kept))

    async def client(node):
        await scaffold.client(Ear(node, kept))

    outcome = run(with_programs(plan, server=server, client=client))
    return outcome, kept


def held(state, counted):
    """A client's control variate as the server knows it: c_i+ if its last report counted."""
    return state["next"] if state["sent"] == counted else state["held"]


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_c_is_the_mean_of_all_controls_also_with_partial_cohorts(option, fraction, rounds):
    plan = small_plan("scaffold", 4, rounds=rounds, data=UNEVEN, option=option, client_fraction=fraction)
    _, kept = listened(plan)
    c, counted = kept[0]["c"].values, kept[0]["counted"]
    controls = [held(kept[k], counted[k]).values for k in range(1, 5) if k in counted]
    assert torch.allclose(c, sum(controls) / 4, rtol=1e-4, atol=1e-6) and float(c.norm()) > 0


def test_late_and_lost_reports_leave_c_the_mean_of_what_clients_hold():
    step_s = run_small("scaffold", 4, rounds=1).time_s
    faults = FaultPlan(crashes=(Crash(2, at_s=2.5 * step_s, down_s=3 * step_s),), detect_s=step_s / 100)
    far = FAST.model_copy(update={"latency_s": step_s})
    plan = small_plan(
        "scaffold", 4, rounds=8, access=[FAST] * 4 + [far], round_deadline_s=1.5 * step_s, faults=faults
    )
    outcome, kept = listened(plan)
    counted = kept[0]["counted"]
    assert outcome.stale["Change"] > 0 and counted.get(4, -1) < 7
    controls = [held(kept[k], counted[k]).values for k in counted]
    assert torch.allclose(kept[0]["c"].values, sum(controls) / 4, rtol=1e-4, atol=1e-6)


def test_with_whole_batches_and_one_step_the_options_agree():
    x, y = (
        run(small_plan("scaffold", 3, rounds=3, train=WHOLE, option=o)).results[0].values for o in ("I", "II")
    )
    assert torch.allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("server_rate", [1.0, 0.5])
def test_with_one_step_of_everybody_the_server_descends_on_the_uniform_mean(server_rate):
    plan = small_plan("scaffold", 3, rounds=3, train=WHOLE, data=UNEVEN, server_rate=server_rate)
    x = start(plan)
    for t in range(3):
        gradients = [gradient(plan, x, batches(plan, k, [t])[0]) for k in (1, 2, 3)]
        x = x - server_rate * rate(plan) * sum(gradients) / 3
    assert torch.allclose(run(plan).results[0].values, x, rtol=0, atol=1e-5)


def test_the_first_round_with_controls_of_zero_is_fedavg():
    one = run(small_plan("scaffold", 4, rounds=1, train={"local_steps": 5}, data=UNEVEN)).results[0]
    two = run(small_plan("fedavg", 4, rounds=1, train={"local_steps": 5}, data=UNEVEN, weighting="uniform"))
    assert torch.allclose(one.values, two.results[0].values, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["I", "II"])
def test_on_quadratics_it_converges_to_the_optimum_and_fedavg_does_not(option):
    sizes = [10] * 4
    found = {}
    for method in ("scaffold", "fedavg"):
        config = {"option": option} if method == "scaffold" else {"weighting": "uniform"}
        plan = quadratic_plan(
            method, sizes, rounds=400, rate=0.05, train={"local_steps": 3}, client_fraction=0.5, **config
        )
        found[method] = distance(run(plan).results[0], optimum(plan, [0.25] * 4))
    assert found["scaffold"] < 1e-5 and found["fedavg"] > 0.02, found


def test_a_report_costs_twice_that_of_fedavg():
    one, two = (run_small(m, 3, rounds=2).traffic.payload_bytes for m in ("scaffold", "fedavg"))
    assert one == 2 * two


@pytest.mark.parametrize("keeps", [False, True])
def test_a_client_that_lost_its_control_is_refused_unless_the_server_keeps_copies(keeps):
    async def forgetful(node):
        node = Wrapped(node)
        if node.life:
            node.saved = None  # its memory card went with it
        await scaffold.client(node)

    one_s = run_small("scaffold", 2, rounds=1).time_s
    faults = FaultPlan(crashes=(Crash(1, at_s=3.5 * one_s, down_s=one_s / 10),), detect_s=one_s / 100)
    plan = small_plan("scaffold", 2, rounds=9, faults=faults, server_keeps_controls=keeps)
    watcher = Watcher()
    outcome = run(with_programs(plan, client=forgetful), watcher)
    refused = [e for e in watcher.events if e[1] == "refused"]
    assert outcome.status == "finished"
    assert {e[3] for e in refused} == {"the update of node 1: it lost its control variate"}
    reports = [m["reports"] for _, _, m in watcher.metrics]
    assert reports[-1] == (2 if keeps else 1) and (len(refused) == 1) == keeps


@pytest.mark.parametrize(
    "train", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"clip_norm": 1.0}, {"optimizer": "adam"}]
)
def test_option_ii_refuses_what_bends_the_path(train):
    plan = small_plan("scaffold", 2, train=train)
    with pytest.raises(ConfigError, match="option II") as caught:
        plan.method.prepare(plan)
    assert caught.value.key == f"train.{next(iter(train))}"
    small_plan("scaffold", 2, train=train, option="I").method.prepare(
        small_plan("scaffold", 2, train=train, option="I")
    )


COMPRESS = [{"name": "top-k", "fraction": 0.02}, {"name": "qsgd"}]


@pytest.mark.parametrize("compress", COMPRESS, ids=["top-k", "qsgd"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_c_is_the_mean_of_all_controls_also_where_they_travel_compressed(compress, fraction):
    plan = small_plan("scaffold", 4, rounds=5, data=UNEVEN, compress=compress, client_fraction=fraction)
    outcome, kept = listened(plan)
    c, counted = kept[0]["c"].values, kept[0]["counted"]
    controls = [held(kept[k], counted[k]).values for k in range(1, 5) if k in counted]
    assert torch.allclose(c, sum(controls) / 4, rtol=1e-4, atol=1e-6) and float(c.norm()) > 0
    d = plan.learner.model.layout.size
    buckets = -(-d // 512)
    one = 8 * round(0.02 * d) if compress["name"] == "top-k" else 4 * buckets + -(-d * 4 // 8)
    sizes = {row[1] / row[0] for (_, _, kind), row in outcome.traffic.table.items() if kind == "Change"}
    assert sizes == {2 * one}


def test_the_largest_entries_of_all_are_the_plain_run_to_rounding():
    everything = {"name": "top-k", "fraction": 1.0}
    plain = run(small_plan("scaffold", 3, rounds=4, data=UNEVEN)).results[0].values
    packed = run(small_plan("scaffold", 3, rounds=4, data=UNEVEN, compress=everything)).results[0].values
    assert torch.allclose(packed, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compress", COMPRESS, ids=["top-k", "qsgd"])
def test_compressed_on_unlike_data_it_learns_nearly_what_the_plain_run_does(compress):
    losses = {}
    for name, table in (("plain", None), ("small", compress)):
        plan = small_plan("scaffold", 4, rounds=60, data=UNEVEN, compress=table, train={"local_steps": 5})
        whole = plan.nodes[1].data.dataset
        x = run(plan).results[0]
        losses[name] = plan.learner.measure(x, Batch(whole.x_test, whole.y_test)).loss
    start_loss = plan.learner.measure(plan.learner.model.init(), Batch(whole.x_test, whole.y_test)).loss
    assert start_loss - losses["small"] > 0.9 * (start_loss - losses["plain"])
