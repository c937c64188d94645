"""HSFL, personal (Sun et al. 2024, https://arxiv.org/abs/2411.13907): split learning with own fronts.

c_k: client k's cut; W[l]: layer l on the server; n_k: examples. A round: every client trains its batches
with a rear of its own on the server, in parallel; then each layer l becomes the mean over its holders
S_l = {k : c_k < l}, weighted by n_k; with S_l empty it keeps its value, and is nobody's. Fronts stay where
they are: nothing of them is uploaded. A client's model is its front with W above it.
Cuts, shares x_k of the link and y_k of the server come from the planner (planning.hsfl); every
`replan_rounds` rounds for what the clients' computing took by then.

Only the paper's abstract could be read, which names personal client-side models, the planner's parts, and
the shortest round. Choices: the aggregation above; optimisers that are fresh in each round; where a cut
moves, a client that gives layers to the server sends its own, which join the round's mean, and one that
takes layers gets W's. A client that was lost goes on with the layers that it had saved, and gives none
away; one that is gone is left out of S_l for that round. Labels are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from edgefl.nodes import Back, Faults, Gone, Message, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.cuts import Link, Part, PlannedCutsConfig, SmashedData, SmashedGradient, mean_of
from edgefl.patterns.fronts import Front, FrontBack, FrontTurn, serve_turns
from edgefl.patterns.rears import RearTurn, Served, finished, mean_rears
from edgefl.patterns.reports import FINITE, answers
from edgefl.patterns.rounds import somebody_alive
from edgefl.planning.assign import SplitFleet, hsfl_plan, refuse_unfit_hsfl
from edgefl.planning.hsfl import HSFLPlan
from edgefl.planning.memory import needs_with_planned_cuts


class HSFLConfig(PlannedCutsConfig):
    """How cuts and shares are found; batches, steps and rate are [train]'s."""

    plan: Literal["genetic", "common", "random", "common-equal", "own-cuts", "raw"] = "genetic"
    """genetic: a cut for each. common: the best one for all. random: any. These at the best shares.
    common-equal: the best cut for all, and own-cuts: each one's best, at equal shares. raw: cut 0 for all, a
    reference: clients hold nothing and send their examples as they are, at the best shares."""
    replan_rounds: int = Field(default=10, ge=1)
    """R: rounds between plans."""
    allow_local: bool = False
    """Whether a client may hold the whole model; nothing of it is then averaged."""
    fading: float = Field(default=0.0, ge=0, le=2)
    """Spread of the links' gains in the planner's 20 scenarios, exp(fading x normal); 0: steady links."""
    channels: int | None = Field(default=None, ge=1, le=10_000)
    """Shares of the link are whole numbers of so many channels; None: any number."""


@dataclass(frozen=True)
class Assigned(Message):
    """A turn: the client's cut, and the layers of W from block `first` on that it has not (None: it has all).

    wants: the server takes over what the client holds beyond the cut.
    """

    stale_by = "turn"
    turn: tuple[int, int]
    cut: int
    first: int
    layers: Vector | None
    wants: bool
    rate_bytes_per_s: float | None


@dataclass(frozen=True)
class Given(Message):
    """The layers beyond its new cut, from a client to the server."""

    stale_by = "turn"
    once_by = ("sender", "turn")
    turn: tuple[int, int]
    layers: Vector


@dataclass(frozen=True)
class BackAgain(FrontBack):
    """The end of the last turn of a client that has come back, once more: the first may not have left."""


async def server(node: Node) -> Vector:
    config: HSFLConfig = node.config
    fleet = SplitFleet.of(node.fleet, node.learner, node.seed)
    clients = node.fleet.ids("client")
    saved = node.saved or {"w": node.model.init(), "round": 0, "slowdowns": dict.fromkeys(clients, 1.0)}
    w: Vector = saved["w"]
    slowdowns: dict[int, float] = dict(saved["slowdowns"])
    held: dict[int, int | None] = dict(saved.get("held", {})) if saved.get("life") == node.life else {}
    plan: HSFLPlan | None = None
    for t in node.rounds(saved["round"]):
        await somebody_alive(node, clients)
        node.take(Back)
        if plan is None:
            plan = hsfl_plan(fleet, config, moves_front=False, slowdowns=[slowdowns[k] for k in clients])
        began_s, turns = node.now(), []
        for n, k in enumerate(clients):
            rate, share = shares_of(plan, n, fleet, config)
            link = Link(k, (node.life, t), config.packing, rate)
            first = 0 if t == 0 else held.get(k)
            turns.append(node.start(_serve(node, link, plan.cuts[n], first, w, share)))
        rears, losses, busy_s = [], [], {}
        held = {}
        for n, turn in enumerate(await finished(node, turns)):
            if (served := turn.value) is not None:
                k, held[clients[n]] = clients[n], plan.cuts[n]
                if served.rear is not None:
                    rears.append((plan.cuts[n], served.rear.parameters, float(node.fleet.num_examples(k))))
                losses.append(served.loss)
                busy_s[k] = served.back.busy_s
        w = mean_rears(node.model, w, rears)
        node.record(
            round=t, reports=len(losses), missing=len(clients) - len(losses), train_loss=mean_of(losses),
            round_s=node.now() - began_s, planned_round_s=plan.shares.round_s,
        )  # fmt: skip
        if (t + 1) % config.replan_rounds == 0:
            slowdowns, plan = fleet.measured(plan.cuts, busy_s, slowdowns, above=0.0), None
        node.publish(w, step=t + 1)
        # On the disk before the next round begins: a client knows its front before one round and no more.
        await node.store(w=w, round=t + 1, slowdowns=slowdowns, held=held, life=node.life)
    return w


def shares_of(
    plan: HSFLPlan, n: int, fleet: SplitFleet, config: HSFLConfig
) -> tuple[float | None, float | None]:
    """What the n-th client has of the link, in bytes per second, and of the server; None: nothing is kept."""
    return config.kept(plan.shares.link[n] * fleet.capacity_bytes_per_s, plan.shares.server[n])


async def _serve(
    node: Node, link: Link, cut: int, held: int | None, w: Vector, share: float | None
) -> Served | None:
    """One client's turn. held: blocks that it has, None where that is not known for sure."""
    model, last = node.model, len(node.model.blocks)
    first = held or 0
    layers = model.cut(w, first, cut) if first < cut else None
    takes_over = held is not None and held > cut
    rate = link.rate_bytes_per_s
    node.send(link.to, Assigned(link.turn, cut, first, layers, takes_over, rate), rate_bytes_per_s=rate)
    rear = model.cut(w, cut, last) if cut < last else None
    if takes_over and rear is not None:
        given = await node.receive(Given, Gone, Back, sender=link.to, turn=link.turn)
        if not isinstance(given, Given):
            return None
        rest = [model.cut(w, held, last)] if held is not None and held < last else []
        rear = model.stage(cut, last).join(given.layers, *rest)
    return await RearTurn(node, link, cut, None if rear is None else Part(rear), share).run()


async def client(node: Node) -> None:
    await serve_turns(node, Assigned, _turn, _tell)


def _tell(node: Node, saved: Mapping[str, Any], again: bool) -> None:
    """The end of a turn, which the client has on the disk: the server never goes on from one that has to be
    done again."""
    kind = BackAgain if again else FrontBack
    back = kind(saved["turn"], None, None, saved["loss"], saved["busy_s"])
    node.send(node.fleet.ids("server"), back, rate_bytes_per_s=saved["rate"])


async def _turn(node: Node, m: Assigned, saved: dict[str, Any]) -> dict[str, Any]:
    """Take or give layers, and train the front."""
    model, rate = node.model, m.rate_bytes_per_s
    # A server that was restarted repeats its round.
    again = "before_" if saved and saved["turn"][1] == m.turn[1] else ""
    own: Vector | None = saved.get(f"{again}front")
    has: int = saved.get(f"{again}cut", 0)
    before = {"before_front": own, "before_cut": has}
    if own is not None and has > m.cut:
        stage = model.stage(0, has)
        if m.wants:
            given = Given(m.turn, stage.cut(own, m.cut, has))
            node.send(m.sender, given, rate_bytes_per_s=rate)
        own = stage.cut(own, 0, m.cut)
    elif has < m.cut:
        assert m.layers is not None
        missing = model.stage(m.first, m.cut).cut(m.layers, has - m.first, m.cut - m.first)
        own = missing if own is None else model.stage(0, m.cut).join(own, missing)
    front = Front(m.turn, m.cut, None, None, "nothing", rate).stamped(m.sender, m.life)
    turn = FrontTurn(node, front, None if own is None else Part(own), node.config.packing)
    back = await turn.run()
    own = None if turn.part is None else turn.part.parameters
    if own is not None:
        node.publish(own, step=m.turn[1] + 1)
    answer = {"turn": m.turn, "loss": back.loss, "busy_s": back.busy_s, "rate": rate}
    return {"front": own, "cut": m.cut, **before, **answer}


METHOD = Method(
    name="hsfl",
    title="Heterogeneous split federated learning, personal fronts",
    paper="Sun et al. 2024, https://arxiv.org/abs/2411.13907",
    roles={"server": server, "client": client},
    messages=(Assigned, Given, SmashedData, SmashedGradient, FrontBack, BackAgain),
    config=HSFLConfig,
    ends_with=("server",),
    needs="star",
    evaluates="personal",
    prepare=refuse_unfit_hsfl,
    memory=needs_with_planned_cuts,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(Assigned, FrontBack), answers(SmashedData, SmashedGradient)),
)
