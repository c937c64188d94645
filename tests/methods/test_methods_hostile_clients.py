"""What clients may send: refused by name where it must be, counted, and the global model stays finite."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest
import torch
from methods_reference import run, with_programs
from small import small_plan
from toy import Watcher

from edgefl.errors import Stuck
from edgefl.learning.poison import Poison
from edgefl.learning.work import LocalSGD
from edgefl.methods import federated
from edgefl.methods.federated.fedasync import GlobalModel as AsyncModel
from edgefl.methods.federated.fedasync import Update
from edgefl.methods.federated.fedavg import GlobalModel, LocalModel
from edgefl.nodes.registry import find_method, methods
from edgefl.parameters import Vector
from edgefl.patterns.reports import is_finite

METHODS = [
    importlib.import_module(info.name).METHOD.name
    for info in pkgutil.iter_modules(federated.__path__, federated.__name__ + ".")
]
EPOCHS = {"train": {"local_steps": None, "local_epochs": 1}}
"""For methods that count in them."""


def first_client(method):
    return small_plan(method, 6).ids("client")[0]


def settings(method):
    return EPOCHS if method == "fedcore" else {}


def test_all_federated_methods_are_meant():
    assert len(METHODS) >= 22 and set(METHODS) <= set(methods())
    assert {"fedavg", "fedasync", "hierarchical-fedavg", "adsp"} <= set(METHODS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("poison", "why"),
    [(Poison("nan"), "it is not finite"), (Poison("noise", 1e30), "above 1e+06")],
    ids=["nan", "enormous"],
)
def test_a_hostile_client_is_refused_by_name_and_the_model_stays_finite(method, poison, why):
    bad = first_client(method)
    plan = small_plan(method, 6, rounds=4, poison={bad: poison}, **settings(method))
    watcher = Watcher()
    outcome = run(plan, watcher)
    refused = [(node, detail) for _, kind, node, detail in watcher.events if kind == "refused"]
    assert outcome.status == "finished" and is_finite(outcome.results[0])
    assert refused and all(detail.startswith(f"the update of node {bad}: ") for _, detail in refused)
    assert all(why in detail for _, detail in refused)
    counted = sum(m.get("refused", 0) for _, _, m in watcher.metrics)
    assert counted == len(refused)
    rest = run(
        dataclasses.replace(plan, nodes=tuple(dataclasses.replace(s, poison=None) for s in plan.nodes))
    )
    assert not torch.equal(outcome.results[0].values, rest.results[0].values)


def run_altered(method, alter, watcher=None, **more):
    """The method's own programs, whose first client's answers are altered on their way.

    alter(message): what is sent in its place, one after the other. Only kinds that carry parameters are.
    """
    plan = small_plan(method, 6, rounds=4, **settings(method), **more)
    bad, program = first_client(method), plan.method.roles["client"]

    async def client(node):
        inner = node.send

        def send(to, message):
            if node.id != bad or not carries(message):
                return inner(to, message)
            return [inner(to, one) for one in alter(message)][-1]

        node.send = send
        await program(node)

    watcher = watcher or Watcher()
    return run(with_programs(plan, client=client), watcher), watcher


def carries(message):
    """The names of a message's fields that are parameters."""
    fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    return [name for name, value in fields.items() if isinstance(value, Vector | torch.Tensor)]


def of_another_shape(message):
    def other(value):
        return torch.zeros(3) if isinstance(value, torch.Tensor) else STAGE.init()

    return [
        dataclasses.replace(message, **{name: other(getattr(message, name)) for name in carries(message)})
    ]


STAGE = small_plan("fedavg", 1).learner.model.stage(0, 1)


@pytest.mark.parametrize("method", METHODS)
def test_parameters_of_another_shape_are_refused_by_name(method):
    outcome, watcher = run_altered(method, of_another_shape)
    refused = [detail for _, kind, _, detail in watcher.events if kind == "refused"]
    bad = first_client(method)
    assert outcome.status == "finished" and is_finite(outcome.results[0])
    assert refused and all(d.startswith(f"the update of node {bad}: it ") for d in refused)
    assert sum(m.get("refused", 0) for _, _, m in watcher.metrics) == len(refused)


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_sent_twice_counts_once(method):
    twice, watcher = run_altered(method, lambda m: [m, m])
    sent = sum(row[0] for (k, _, _), row in twice.traffic.table.items() if k == first_client(method))
    assert twice.status == "finished" and is_finite(twice.results[0])
    assert 0 < twice.dropped["repeated"] <= sent // 2
    once, honest = run_altered(method, lambda m: [m])
    assert once.dropped.get("repeated", 0) == 0
    if method not in ASYNCHRONOUS:  # of these what comes first depends on how long the lines are busy
        assert twice.results[0].equal(once.results[0])
    assert len(watcher.models) == len(honest.models)


ASYNCHRONOUS = {"fedasync", "fedbuff", "ssp", "asyncdrop", "adsp", "adacomm"}


def of_an_earlier_turn(message):
    """An answer to a round, or a turn, before the first."""
    name = "round" if hasattr(message, "round") else "turn"
    return [dataclasses.replace(message, **{name: -1})]


WAIT_FOR_ALL = {"bsp", "ssp"}
"""These know no deadline: one that lives and does not answer holds them up, and a runtime names it."""


@pytest.mark.parametrize("method", sorted(set(METHODS) - WAIT_FOR_ALL))
def test_an_answer_to_another_round_is_dropped_and_counted(method):
    """Where the server waits for all, the round ends at its deadline without it."""
    has_deadline = "round_deadline_s" in find_method(method).config.model_fields
    outcome, watcher = run_altered(
        method, of_an_earlier_turn, **({"round_deadline_s": 5.0} if has_deadline else {})
    )
    counted = sum(m.get("dropped", 0) + m.get("refused", 0) for _, _, m in watcher.metrics)
    assert outcome.status == "finished" and is_finite(outcome.results[0])
    assert sum(outcome.stale.values()) + counted > 0


@pytest.mark.parametrize("method", sorted(WAIT_FOR_ALL))
def test_an_answer_to_another_clock_is_dropped_and_counted(method):
    watcher = Watcher()
    with pytest.raises(Stuck, match=r"server 0 \(toy\) waits for Push"):
        run_altered(method, of_an_earlier_turn, watcher)
    assert sum(m.get("dropped", 0) for _, _, m in watcher.metrics) == 1


def _lying(change):
    """FedAvg's client, whose first report is changed on its way; it trains once a round."""

    async def client(node):
        while True:
            m = await node.receive(GlobalModel)
            r = await node.compute(LocalSGD(m.parameters, node.data, m.round, node.workload))
            report = LocalModel(m.round, r.parameters, len(node.data), r.num_steps, r.loss)
            for one in change(report) if node.id == 1 else [report]:
                node.send(m.sender, one)

    return client


def _run_lying(change, rounds=3):
    plan = with_programs(small_plan("fedavg", 3, rounds=rounds), client=_lying(change))
    watcher = Watcher()
    return run(plan, watcher), watcher


def test_a_report_of_an_earlier_round_is_dropped_and_counted():
    """It waits for the client's next one in vain, so the round ends at its deadline."""
    plan = small_plan("fedavg", 3, rounds=3, round_deadline_s=1.0)
    watcher = Watcher()
    old = _lying(lambda r: [dataclasses.replace(r, round=r.round - 1)])
    outcome = run(with_programs(plan, client=old), watcher)
    assert outcome.stale == {"LocalModel": 3}
    assert [m["late"] for _, _, m in watcher.metrics] == [1, 1, 1]


def test_the_same_report_twice_counts_once():
    outcome, watcher = _run_lying(lambda r: [r, r])
    honest, _ = _run_lying(lambda r: [r])
    assert outcome.dropped["repeated"] == 3 and [m["reports"] for _, _, m in watcher.metrics] == [3] * 3
    assert outcome.results[0].equal(honest.results[0])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_examples": -5}, "its weight -5 is not above 0"),
        ({"num_examples": 0}, "its weight 0 is not above 0"),
        ({"num_steps": 0}, "it claims 0 local steps"),
        ({"parameters": (torch.ones(2), torch.ones(2))}, "it is packed, and this run compresses nothing"),
    ],
    ids=["negative weight", "no weight", "no steps", "wrong form"],
)
def test_impossible_claims_are_refused_by_name(changes, why):
    outcome, watcher = _run_lying(lambda r: [dataclasses.replace(r, **changes)])
    assert [d for _, kind, _, d in watcher.events if kind == "refused"] == [
        f"the update of node 1: {why}"
    ] * 3
    assert [m["refused"] for _, _, m in watcher.metrics] == [1] * 3 and is_finite(outcome.results[0])


def test_a_model_of_another_shape_is_refused_by_name():
    stage = small_plan("fedavg", 1).learner.model.stage(0, 1)
    _, watcher = _run_lying(lambda r: [dataclasses.replace(r, parameters=stage.init())])
    details = {d for _, kind, _, d in watcher.events if kind == "refused"}
    assert details == {"the update of node 1: it has another layout than the model"}


def test_a_loss_that_is_no_number_does_not_show_in_the_mean():
    _, watcher = _run_lying(lambda r: [dataclasses.replace(r, loss=float("nan"))])
    assert all(m["train_loss"] == m["train_loss"] for _, _, m in watcher.metrics)


def test_the_same_asynchronous_update_twice_counts_once():
    async def client(node):
        while True:
            m = await node.receive(AsyncModel)
            r = await node.compute(LocalSGD(m.parameters, node.data, m.turn, node.workload))
            for _ in range(2 if node.id == 1 else 1):
                node.send(m.sender, Update(m.life, m.version, m.turn, r.parameters, r.loss))

    plan = with_programs(small_plan("fedasync", 3, rounds=4), client=client)
    watcher = Watcher()
    outcome = run(plan, watcher)
    assert outcome.dropped["repeated"] == 4 and len(watcher.models) == 12
