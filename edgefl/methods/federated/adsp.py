"""ADSP, adaptive synchronous parallel (Hu, Wang, Wu 2020, https://arxiv.org/abs/1911.06949).

W: the server's model; M: clients at work; Gamma: the check period; c_i: commits of client i so far. A client
never waits but for its own commits: it makes SGD steps on W_i and at times commits U_i = W_i - W_base and
goes on from the W that it is given in return. Server: W <- W + U_i / M at once, without any barrier. At each
check point C_target <- C_target + c, and client i is told DeltaC_i = max(1, C_target - c_i), its commits of
the next period: all commit equally often, and who is faster makes more steps between two commits. The rate c
is searched for while training goes on, by the loss at the server (patterns/commit_rate.py).

Choices. timer = "due": the n-th commit of a period is due n Gamma / DeltaC_i after it has begun, and a client
commits at the end of a step if another one and the commit's own time O_i (that of its last one, at first the
planned) would end later. "interval": it does so once max(d_min, Gamma / DeltaC_i - O_i) have passed since
the last commit, as the authors' code does; intervals are rounded up to whole steps, and the next period's
DeltaC_i makes up for what is missing. c never exceeds floor(Gamma / max_i(step_i + O_i)). Losses are those
of examples that no client trains on; commits do not queue behind their evaluation, and a period begins when
that of the last one is known. The optimiser is fresh with each model. A round of [stop] is as many commits
as there are clients. One that is gone leaves M; one that returns enters with the smallest c_i of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from edgefl.learning.optimizer import State
from edgefl.learning.work import Evaluate, Evaluation, LocalSGD, Trained
from edgefl.nodes import Back, Faults, Gone, Message, Method, MethodConfig, Node, Task
from edgefl.parameters import Vector
from edgefl.patterns.commit_rate import RateSearch, check_period_s, implicit_momentum
from edgefl.patterns.compression import Sent, Uplink
from edgefl.patterns.reports import FINITE, MOST_NORM, Intake, answers, is_finite


class ADSPConfig(MethodConfig):
    """Gamma, the timer, the search; batch and step are [train]'s."""

    check_period_s: float | None = Field(default=None, gt=0)
    """Gamma: seconds from check point to check point; None: 30 planned steps of the median device."""
    commits_per_period: int | None = Field(default=None, ge=1)
    """c, without a search."""
    timer: Literal["due", "interval"] = "due"
    """When a client commits: by due times within the period, or so long after its last commit."""
    min_interval_s: float | None = Field(default=None, ge=0)
    """d_min, of the timer "interval"; None: one step."""
    search_every_s: float | None = Field(default=None, gt=0)
    """Seconds from the beginning of a search to the next; None: 17 check periods."""
    target_loss: float | None = Field(default=None, gt=0)
    """Rewards go by the time at which this loss is expected; None: a tenth of the first loss."""
    loss_rise: float = Field(default=0.3, gt=0)
    """A loss that rises by so much from one check point to the next, 0.3: by 30 %, begins a search."""
    num_held_out: int = Field(default=256, ge=1)
    """Test examples that the server takes its loss from."""
    server_momentum: float = Field(default=0.0, ge=0, lt=1)
    """mu: v <- mu v + U_i / M, W <- W + v."""
    max_update_norm: float = Field(default=MOST_NORM, gt=0)
    """Larger changes of a client are refused."""


@dataclass(frozen=True)
class GlobalModel(Message):
    """W; turn: how often the receiver has been given it; counted: that of its last commit that counted."""

    newest_by = ("sender",)
    turn: int
    parameters: Vector
    counted: int


@dataclass(frozen=True)
class Check(Message):
    """A period begins. commits: DeltaC_i."""

    newest_by = ("sender",)
    commits: int


@dataclass(frozen=True)
class Commit(Message):
    """U_i, of num_steps steps; given, turn: the server's life and the turn in which it gave the model.

    step_s, commit_s: what its last step and its last commit took, in seconds.
    """

    once_by = ("sender", "life", "given", "turn")
    given: int
    turn: int
    change: Sent
    num_steps: int
    step_s: float
    commit_s: float
    loss: float


def planned_commit_s(node: Node, k: int) -> float:
    """What a commit of client k should take: its change up and a model down."""
    fleet, size, server = node.fleet, node.model.counts.parameter_bytes, node.fleet.ids("server")[0]
    rates = fleet.rate_bytes_per_s(k, server), fleet.rate_bytes_per_s(server, k)
    return sum(size / rate for rate in rates) + fleet.latency_s(k, server) + fleet.latency_s(server, k)


class Hub:
    """The server's side: W, who has committed how often, and the period at hand.

    active: who is at work. losses: those of the period at hand, as far as they are known; asked: how many
    have been asked for. evaluating: those under way, oldest first.
    """

    def __init__(self, node: Node) -> None:
        config: ADSPConfig = node.config
        clients = node.fleet.ids("client")
        fresh = {"v": None, "taken": 0, "target": 0, "search": None, "life": -1}
        counts = {name: dict.fromkeys(clients, 0) for name in ("commits", "turns", "versions", "counted")}
        s = node.saved or {"x": node.model.init(), **fresh, **counts}
        self._node, self.period_s = node, check_period_s(node, config.check_period_s)
        self._held_out = node.fleet.held_out(config.num_held_out)
        self._intake = Intake(node, config.max_update_norm)
        every_s = config.search_every_s or 17 * self.period_s
        self.search = RateSearch(
            every_s, config.target_loss, config.loss_rise, config.commits_per_period, s["search"]
        )
        self.x: Vector = s["x"]
        self._v: Vector | None = s["v"]
        self.taken: int = s["taken"]
        self._target: int = s["target"]
        self._commits: dict[int, int] = dict(s["commits"])
        self._turns: dict[int, int] = dict(s["turns"])
        self._versions: dict[int, int] = dict(s["versions"])  # commits taken when each was given W
        self._counted: dict[int, int] = dict(s["counted"])
        self.evaluating: list[Task[Evaluation]] = []
        self.unsaved = 0
        if s["life"] == node.life:
            self._active, self._paces = dict.fromkeys(s["active"]), {k: tuple(p) for k, p in s["paces"]}
            self._start_s: float = s["start_s"]
            self._asked: int = s["asked"]
            self._losses: list[float] = list(s["losses"])
        else:  # in a new life nobody is known to be at work
            self._active = dict.fromkeys(node.fleet.living(clients))
            self._paces = {k: (node.fleet.step_s(k), planned_commit_s(node, k)) for k in clients}
            self.search.restart()
            for k in self._active:
                self._give(k)
            self._begin()

    # --- clients --------------------------------------------------------------------------------------

    def _give(self, k: int) -> None:
        self._turns[k] += 1
        self._versions[k] = self.taken
        self._node.send(k, GlobalModel(self._turns[k], self.x, self._counted[k]))

    def commit(self, m: Commit) -> None:
        """Take a commit and answer it; one that answers no model of now is dropped."""
        k = m.sender
        if m.given != self._node.life or m.turn != self._turns[k] or k not in self._active:
            self._node.record(dropped=1)
            return
        u = self._intake.change(k, m.change, self.x.layout)
        if u is None:
            self._node.record(refused=1)
        else:
            self._add(u / len(self._active))
            self._counted[k] = m.turn
            stale = self.taken - self._versions[k]
            self._node.record(staleness=stale, train_loss=m.loss, local_steps=m.num_steps)
        if math.isfinite(m.step_s + m.commit_s) and min(m.step_s, m.commit_s) >= 0:
            self._paces[k] = m.step_s, m.commit_s
        self._commits[k] += 1
        self.taken, self.unsaved = self.taken + 1, self.unsaved + 1
        self._give(k)
        self._node.publish(self.x, step=self.taken)

    def _add(self, u: Vector) -> None:
        mu = self._node.config.server_momentum
        v = u if self._v is None else self._v * mu + u
        if is_finite(x := self.x + v):
            self.x, self._v = x, v if mu else None

    def leave(self, k: int) -> None:
        """Client k is gone: it counts neither for M nor at check points."""
        if k in self._active:
            del self._active[k]
            self._node.record(lost=1)
        if not self._active:
            for task in self.evaluating:
                task.cancel()
            self.evaluating.clear()

    def enter(self, k: int) -> None:
        """Client k is back."""
        is_first = not self._active
        self._commits[k] = min((self._commits[j] for j in self._active), default=self._commits[k])
        self._active[k] = None
        self._give(k)
        if is_first:
            self.search.restart()
            self._begin()
        else:
            self._check(k)

    # --- periods --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A period begins: everybody hears how often to commit in it."""
        self._start_s, self._asked, self._losses = self._node.now(), 0, []
        self._target += self.search.c
        for k in self._active:
            self._check(k)

    def _check(self, k: int) -> None:
        self._node.send(k, Check(self._wanted(k)))

    def _wanted(self, k: int) -> int:
        """DeltaC_i."""
        return max(1, self._target - self._commits[k])

    def _next_s(self) -> float | None:
        instants = self.search.instants
        if not self._active or self._asked == len(instants):
            return None
        return self._start_s + instants[self._asked] * self.period_s

    def left_s(self) -> float | None:
        """Seconds until the loss is wanted; None while it is not. Where it is due, its evaluation begins."""
        while (at_s := self._next_s()) is not None:
            if self._node.now() < at_s:
                return at_s - self._node.now()
            self._asked += 1
            if self._asked == len(self.search.instants):
                self._record()
            self.evaluating.append(self._node.start(self._node.compute(Evaluate(self.x, self._held_out))))
        return None

    def evaluated(self) -> None:
        """The oldest evaluation is done; with the period's last one the next period begins."""
        self._losses.append(self.evaluating.pop(0).value.loss)
        if len(self._losses) < len(self.search.instants):
            return
        slowest_s = max(sum(self._paces[k]) for k in self._active)
        most = max(1, math.floor(self.period_s / slowest_s + 1e-9))
        found = self.search.end(self._start_s, self.period_s, self._losses, most)
        if found is not None:
            self._node.record(reward=found)
        self._begin()

    def _record(self) -> None:
        counts = [self._commits[k] for k in self._active]
        steps = (self.period_s / max(self._paces[k][0], 1e-9) for k in self._active)  # v_i, of a period
        gaps = [1 / (self.search.c * v) for v in steps]
        self._node.record(
            spread=max(counts) - min(counts),
            commits_wanted=self.search.c,
            implicit_momentum=implicit_momentum(gaps),
        )

    def state(self) -> dict[str, Any]:
        """For a save."""
        return {
            "x": self.x,
            "v": self._v,
            "taken": self.taken,
            "target": self._target,
            "commits": dict(self._commits),
            "turns": dict(self._turns),
            "versions": dict(self._versions),
            "counted": dict(self._counted),
            "search": self.search.state(),
            "active": tuple(self._active),
            "paces": tuple(self._paces.items()),
            "start_s": self._start_s,
            "asked": self._asked,
            "losses": tuple(self._losses),
            "life": self._node.life,
        }


async def server(node: Node) -> Vector:
    hub, num_clients = Hub(node), len(node.fleet.ids("client"))
    stop = None if node.num_rounds is None else node.num_rounds * num_clients
    while stop is None or hub.taken < stop:
        left_s = hub.left_s()
        m = await node.first(node.receive(Commit, Gone, Back), *hub.evaluating[:1], timeout_s=left_s)
        if isinstance(m, Commit):
            hub.commit(m)
        elif isinstance(m, Gone):
            hub.leave(m.sender)
        elif isinstance(m, Back):
            hub.enter(m.sender)
        elif m is not None:
            hub.evaluated()
        if hub.unsaved >= num_clients and not hub.evaluating:
            hub.unsaved = 0
            await node.save(**hub.state())
    return hub.x


class Timer:
    """A client's clock: when it is to commit. step_s, commit_s: what its last step and commit took."""

    def __init__(self, node: Node) -> None:
        s = node.saved or {
            "start_s": 0.0,
            "wanted": 1,
            "made": 0,
            "commit_s": planned_commit_s(node, node.id),
        }
        self._node, self._period_s = node, check_period_s(node, node.config.check_period_s)
        self._start_s: float = s["start_s"]
        self._wanted: int = s["wanted"]
        self._made: int = s["made"]
        self.step_s, self.commit_s = node.fleet.step_s(node.id), s["commit_s"]
        self._since_s = node.now()
        self._sent_s: float | None = s["sent_s"] if s.get("life") == node.life else None

    def hear(self, m: Check) -> None:
        """A period begins now."""
        self._start_s, self._wanted, self._made = self._node.now(), m.commits, 0

    def given(self) -> None:
        """The model is here: training goes on."""
        self._since_s = self._node.now()
        if self._sent_s is not None:
            self.commit_s, self._sent_s = self._since_s - self._sent_s, None
            self._node.record(commit_s=self.commit_s)

    def sent(self) -> None:
        """A commit leaves."""
        self._made, self._sent_s = self._made + 1, self._node.now()

    @property
    def is_up(self) -> bool:
        """Whether to commit now, at the end of a step."""
        config, now, gap_s = self._node.config, self._node.now(), self._period_s / self._wanted
        if config.timer == "due":
            due_s = self._start_s + (self._made + 1) * gap_s
            return bool(now + self.step_s + self.commit_s > due_s)
        least_s = self.step_s if config.min_interval_s is None else config.min_interval_s
        return bool(now - self._since_s >= max(least_s, gap_s - self.commit_s))

    async def step(self, work: LocalSGD) -> Trained:
        """A local step; a check that arrives meanwhile is heard at once."""
        begun_s, computing = self._node.now(), self._node.start(self._node.compute(work))
        while (m := await self._node.first(computing, self._node.receive(Check))) is not computing:
            self.hear(m)
        self.step_s = self._node.now() - begun_s
        return computing.value  # type: ignore[no-any-return]

    def state(self) -> dict[str, Any]:
        """For a save."""
        return {
            "start_s": self._start_s,
            "wanted": self._wanted,
            "made": self._made,
            "commit_s": self.commit_s,
            "sent_s": self._sent_s,
            "life": self._node.life,
        }


async def client(node: Node) -> None:
    assert node.data is not None
    timer, uplink, per_round = Timer(node), Uplink(node), node.workload.num_steps(len(node.data))
    steps = 0 if node.saved is None else node.saved["steps"]
    while True:
        m: GlobalModel | Check = await node.receive(GlobalModel, Check)
        if isinstance(m, Check):
            timer.hear(m)
            continue
        timer.given()
        uplink.settle(m.counted)
        W_i, losses = m.parameters, list[float]()
        state: State | None = None
        while not losses or not timer.is_up:
            t, k = divmod(steps, per_round)
            work = LocalSGD(W_i, node.data, t, node.workload, state=state, part=range(k, k + 1))
            r = await timer.step(work)
            W_i, state, steps = r.parameters, r.state, steps + 1
            losses.append(r.loss)
        loss = sum(losses) / len(losses)
        U_i = uplink.change(W_i - m.parameters, tag=m.turn)
        node.send(m.sender, Commit(m.life, m.turn, U_i, len(losses), timer.step_s, timer.commit_s, loss))
        timer.sent()
        await uplink.save(steps=steps, **timer.state())


METHOD = Method(
    name="adsp",
    title="Adaptive synchronous parallel",
    paper="Hu, Wang, Wu 2020, https://arxiv.org/abs/1911.06949",
    roles={"server": server, "client": client},
    messages=(GlobalModel, Check, Commit),
    config=ADSPConfig,
    ends_with=("server",),
    needs="star",
    evaluates="server",
    compresses=True,
    tolerates=Faults(crashes=True, returns=True, partitions=True),
    invariants=(FINITE, answers(GlobalModel, Commit)),
)
