"""Moshpit SGD (Ryabinin, Gorbunov, Plokhotnyuk, Pekhimenko 2021, https://arxiv.org/abs/2103.03239).

Peers sit on a virtual grid of d dimensions with M cells per side. Peer i's key C_i holds d - 1 coordinates;
peers with equal keys form a group of at most M, found without a coordinator (patterns/matchmaking.py). Round
t: tau local steps ([train]), then a butterfly all-reduce in the group (patterns/butterfly.py), and the
peer's place in its group becomes its newest coordinate, C <- (c_2, ..., c_{d-1}, place). With a full grid d
rounds give the exact mean; members who vanish spoil one small group for one round.
The place is mapped into 0 .. M-1 by a sample of distinct values keyed by the group's id, so that partly
filled groups spread as well (hivemind).
Choices: keys start as the lowest d - 1 base-M digits of a peer's rank, a full grid where n = M^d. A peer that
finds no group counts the round as done and draws its newest coordinate. Leaders wait for members for a tenth
of their local phase, and as long as it takes to agree. A group averaging ends for all, also for who found no
group, when the leader's time and a full group's averaging are over: peers whose groups begin at once or are
small would else be early, and members of groups that ended at different times would miss each other. A
member's part is waited for three times the predicted transfer. A peer that has made its rounds answers on
until all have, or until nobody has said so for a while.
`round_in_key` adds t to the key, as the paper's pseudocode does; hivemind's keys have none, so that peers at
different rounds meet.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from edgefl.errors import ConfigError
from edgefl.keyed import generator
from edgefl.learning.work import LocalSGD, Trained
from edgefl.nodes import Faults, Method, MethodConfig, Node
from edgefl.nodes.plan import RunPlan
from edgefl.parameters import Vector
from edgefl.parameters.packing import pack, unpack
from edgefl.patterns.butterfly import Difference, Part, butterfly_mean, load_split, split_time_s
from edgefl.patterns.farewell import Finished, patience_s, until_all_finish
from edgefl.patterns.matchmaking import MESSAGES, Group, Matchmaker
from edgefl.patterns.reports import ALL_FINITE, answers

Key = tuple[int, ...]
WORD_BYTES = 150
"""About the size of a message of matchmaking."""


class MoshpitConfig(MethodConfig):
    """The grid and the search for groups; tau and the rate are [train]'s."""

    dimensions: int = Field(default=2, ge=1, le=64)
    """d: axes of the grid; 1: everybody in one group."""
    group_size: int | None = Field(default=None, ge=2)
    """M: cells per side, most members of a group; the least with M^d >= n where not given."""
    group_rounds: int = Field(default=1, ge=1)
    """Group averagings after each local phase."""
    min_group_size: int = Field(default=2, ge=2)
    """Fewest members with which a group begins when its leader's time is up."""
    matchmaking_s: float | None = Field(default=None, gt=0)
    """How long a leader waits for members; where not given, a tenth of its local phase, and ten times what a
    round trip of a message to and from each member takes."""
    request_timeout_s: float = Field(default=3.0, gt=0)
    """How long a peer that was asked may take to answer."""
    weighting: str = Field(default="uniform", pattern="^(uniform|samples)$")
    """A member's weight in its group's mean: 1, or its examples."""
    round_in_key: bool = False
    """Whether only peers in the same round can meet."""
    absence: float = Field(default=0.0, ge=0, lt=1)
    """p: probability that a peer stays out of a round's averaging, for as long as that takes (the paper's
    experiment)."""


def start_key(rank: int, M: int, d: int) -> Key:
    """The lowest d - 1 base-M digits of a peer's rank, lowest first."""
    return tuple(rank // M**k % M for k in range(d - 1))


def next_key(key: Key, group: Group, M: int) -> Key:
    """The oldest coordinate goes, and this peer's place in the group, spread over 0 .. M-1, comes."""
    if not key:
        return key
    places = generator(group.id, "places").permutation(M)[: len(group.members)]
    return (*key[1:], int(places[group.index]))


def side(n: int, config: MoshpitConfig) -> int:
    """M: the least number >= 2 with M^d >= n where the config names none."""
    M = config.group_size or 2
    while config.group_size is None and M**config.dimensions < n:
        M += 1
    return M


async def peer(node: Node) -> Vector:
    assert node.data is not None
    config: MoshpitConfig = node.config
    peers = node.fleet.ids("peer")
    M = side(len(peers), config)
    saved = node.saved or {"x": node.model.init(), "round": 0, "state": None, "key": None}
    x: Vector = saved["x"]
    state, C = saved["state"], saved["key"]
    C = start_key(peers.index(node.id), M, config.dimensions) if C is None else tuple(C)
    access = node.fleet.access(node.id)
    maker = Matchmaker(
        node,
        peers,
        min_size=config.min_group_size,
        request_timeout_s=config.request_timeout_s,
        bandwidth_bytes_per_s=min(access.up_bytes_per_s, access.down_bytes_per_s),
        weight=len(node.data) if config.weighting == "samples" else 1.0,
    )
    averaging_s, talk_s = _predicted_s(node, peers, M, x)
    for t in node.rounds(saved["round"]):
        began_s = node.now()
        r: Trained = await node.compute(LocalSGD(x, node.data, t, node.workload, state=state))  # tau steps
        x, state = r.parameters, r.state
        window_s = config.matchmaking_s or (node.now() - began_s) / 10 + 10 * talk_s
        absent = float(node.rng("absent", t).random()) < config.absence
        if absent:
            await node.sleep(config.group_rounds * (window_s + averaging_s))
        for k in range(0 if absent or len(peers) == 1 else config.group_rounds):
            stamp = f"{t}.{k}/" if config.round_in_key else ""
            expires_s = node.now() + window_s
            group = await maker.find(stamp + ".".join(map(str, C)), M, window_s)
            if group is None:
                drawn = int(node.rng("coordinate", t, k).integers(M))
                C = (*C[1:], drawn) if C else C
            else:
                x = await _averaged(node, x, group, maker.weight)
                C, expires_s = next_key(C, group, M), group.expires_s
                node.record(group_size=len(group.members))
            await node.sleep(max(0.0, expires_s + averaging_s - node.now()))
        node.record(round=t, train_loss=r.loss)
        node.publish(x, step=t + 1)
        await node.save(x=x, round=t + 1, state=state, key=C)
    await until_all_finish(node, [j for j in peers if j != node.id], timeout_s=patience_s(node, 2))
    return x


def _predicted_s(node: Node, peers: Sequence[int], M: int, x: Vector) -> tuple[float, float]:
    """Seconds of the averaging in a full group of peers like this one, and of a word to and from each."""
    access = node.fleet.access(node.id)
    rate = min(access.up_bytes_per_s, access.down_bytes_per_s)
    round_trip_s = 2 * max(node.fleet.latency_s(node.id, j) for j in peers)
    averaging_s = split_time_s([rate] * M, [1 / M] * M, pack(x).nbytes) + round_trip_s
    return averaging_s, round_trip_s + M * WORD_BYTES / rate


async def _averaged(node: Node, x: Vector, group: Group, weight: float) -> Vector:
    """The group's mean; what could not be had of it stays x's."""
    packed = pack(x)
    b = group.bandwidths_bytes_per_s
    shares = load_split(b)
    latency_s = max(node.fleet.latency_s(node.id, j) for j in group.members)
    predicted_s = split_time_s(b, shares, packed.nbytes) + 2 * latency_s
    mean = await butterfly_mean(
        node, group.members, packed, shares, group=group.id, timeout_s=3 * predicted_s, weight=weight
    )
    return unpack(mean, x)


def _refuse_impossible(plan: RunPlan) -> None:
    config, n = plan.config, len(plan.nodes)
    M = side(n, config)
    if M**config.dimensions < n:
        accepted = f"at least {side(n, config.model_copy(update={'group_size': None}))} for {n} peers"
        raise ConfigError("method.moshpit-sgd.group_size", M, f"{accepted} in {config.dimensions} dimensions")
    if config.min_group_size > M:
        raise ConfigError("method.moshpit-sgd.min_group_size", config.min_group_size, f"at most {M}")


METHOD = Method(
    name="moshpit-sgd",
    title="Local SGD with group averaging on a grid of keys",
    paper="Ryabinin et al. 2021, https://arxiv.org/abs/2103.03239",
    roles={"peer": peer},
    messages=(*MESSAGES, Part, Difference, Finished),
    config=MoshpitConfig,
    ends_with=("peer",),
    needs="complete",
    evaluates="each",
    prepare=_refuse_impossible,
    tolerates=Faults(crashes=True, returns=True, partitions=True, silence=True),
    invariants=(ALL_FINITE, answers(Part, Difference)),
)
