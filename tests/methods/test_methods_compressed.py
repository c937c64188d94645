"""[compress] under every method that sends updates."""

from __future__ import annotations

import pytest
import torch
from methods_reference import run
from small import run_small, small_plan
from toy import Watcher

from edgefl.nodes.plan import Crash, FaultPlan

ALL = [
    "fedavg",
    "fedprox",
    "fednova",
    "fedadam",
    "fedyogi",
    "fedadagrad",
    "median",
    "fedasync",
    "fedbuff",
    "bsp",
    "ssp",
    "adacomm",
    "fixed-adacomm",
    "adsp",
    "asyncdrop",
    "fjord",
]
SENT = {"asyncdrop": 3610, "fjord": 4810}
"""Values that client 1 sends of 64-64-10 where it has not the whole model: of 48 units; its own corner."""


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize(
    "compress", [{"name": "top-k", "fraction": 0.02}, {"name": "qsgd"}], ids=["top-k", "qsgd"]
)
def test_every_method_that_sends_updates_sends_fewer_bytes_and_learns(method, compress):
    assert small_plan(method, 3).method.compresses
    up = {}
    for name, table in (("whole", None), ("small", compress)):
        plan = small_plan(method, 3, rounds=6, compress=table, train={"local_steps": 5})
        outcome = run(plan)
        up[name] = sum(
            row[1] / row[0] for (sender, _, _), row in outcome.traffic.table.items() if sender == 1
        )
    d = SENT.get(method, plan.learner.model.layout.size)
    k, buckets = round(0.02 * d), -(-d // 512)
    assert up["whole"] == 4 * d
    assert up["small"] == (8 * k if compress["name"] == "top-k" else 4 * buckets + -(-d * 4 // 8))
    part = plan.nodes[1].data
    batch = part.take(part.indices)
    first = plan.learner.measure(plan.learner.model.init(), batch).loss
    assert plan.learner.measure(outcome.results[0], batch).loss < first


@pytest.mark.parametrize(
    "method", ["fedavg", "fedasync", "fedbuff", "ssp", "adacomm", "adsp", "asyncdrop", "fjord"]
)
def test_the_largest_entries_of_all_are_the_plain_run_to_rounding(method):
    plain = run(small_plan(method, 3, rounds=3)).results[0]
    all_of_it = run(small_plan(method, 3, rounds=3, compress={"name": "top-k", "fraction": 1.0}))
    assert torch.allclose(all_of_it.results[0].values, plain.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("method", "share"), [("fedavg", 0.8), ("fjord", 0.9), ("asyncdrop", 0.9)])
def test_memory_helps(method, share):
    """1 % of the entries: with what was not sent kept, the loss falls further."""
    losses = []
    for feedback in (True, False):
        table = {"name": "top-k", "fraction": 0.01, "error_feedback": feedback}
        plan = small_plan(method, 3, rounds=25, compress=table, train={"local_steps": 2})
        part = plan.nodes[1].data
        losses.append(plan.learner.measure(run(plan).results[0], part.take(part.indices)).loss)
    assert losses[0] < share * losses[1]


@pytest.mark.parametrize("method", ["fedasync", "asyncdrop"])
def test_an_update_whose_start_the_server_forgot_is_refused_by_name(method):
    one_s = run_small(method, 3, rounds=1, compress={"name": "qsgd"}).time_s
    faults = FaultPlan(crashes=(Crash(0, at_s=3.5 * one_s, down_s=one_s / 1e6),), detect_s=10.0)
    watcher = Watcher()
    outcome = run_small(method, 3, rounds=8, compress={"name": "qsgd"}, faults=faults, watcher=watcher)
    assert outcome.status == "finished"
    assert any(
        "is not known any more" in detail for _, kind, _, detail in watcher.events if kind == "refused"
    )
