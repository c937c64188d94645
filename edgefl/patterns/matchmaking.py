"""Matchmaking without a coordinator: peers with one key find each other and agree on a group.

A key's entries (who looks for a group, until when) lie at one of the peers: the first living one in an
order keyed by the key, which stands for a distributed hash table. A peer declares itself there until its
expiration, and hears of all entries that are earlier than its own, those that come later included. Leaders
are elected by time: a peer asks the earliest entry to be its leader, in the order of (expiration, id), and
only ever asks one that is earlier than itself, so that two never ask each other. A leader accepts while it
looks for members itself; one that is accepted elsewhere sends its own followers there. A full group begins at
once, a smaller one when its leader's time is up, if it has min_size members.
Source: hivemind's matchmaking, as used by Moshpit SGD (https://arxiv.org/abs/2103.03239).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgefl.keyed import generator
from edgefl.nodes import Gone, Message, Node
from edgefl.patterns.farewell import Leaving

Rank = tuple[float, int]
"""(expiration in seconds on the run's clock, id): who is earlier leads."""


@dataclass(frozen=True)
class Declare(Message):
    """Its sender looks for a group under this key until `expires_s`; not `looking`: no longer."""

    key: str
    attempt: int
    expires_s: float
    looking: bool = True


@dataclass(frozen=True)
class Earlier(Message):
    """A key's entries that are earlier than the receiver's, by peer. attempt: the receiver's, as declared."""

    stale_by = "attempt"
    attempt: int
    peers: tuple[int, ...]
    expires_s: tuple[float, ...]


@dataclass(frozen=True)
class Join(Message):
    """Be my leader; or, `leaving`, no longer. bandwidth, weight: what the group should know of the asker."""

    key: str
    attempt: int
    expires_s: float
    bandwidth_bytes_per_s: float
    weight: float
    leaving: bool = False


@dataclass(frozen=True)
class Accepted(Message):
    stale_by = "attempt"
    attempt: int


@dataclass(frozen=True)
class Refused(Message):
    """No, or no more. leader: whom to ask instead, -1 for nobody."""

    stale_by = "attempt"
    attempt: int
    reason: str
    leader: int = -1
    leader_expires_s: float = 0.0


@dataclass(frozen=True)
class Begin(Message):
    """The group is complete: its id, and its members in random order with what they said of themselves."""

    stale_by = "attempt"
    attempt: int
    group: int
    members: tuple[int, ...]
    bandwidths_bytes_per_s: tuple[float, ...]
    weights: tuple[float, ...]


MESSAGES = (Declare, Earlier, Join, Accepted, Refused, Begin, Leaving)


@dataclass(frozen=True)
class Group:
    """id: the same at all members, and at no other group. index: this node's place among the members.

    expires_s: when its leader's time is up, or would have been.
    """

    id: int
    members: tuple[int, ...]
    bandwidths_bytes_per_s: tuple[float, ...]
    weights: tuple[float, ...]
    index: int
    expires_s: float


@dataclass
class _Search:
    """This node's look for a group."""

    key: str
    attempt: int
    size: int
    rank: Rank
    kept_by: int
    followers: dict[int, Join] = field(default_factory=dict)
    candidates: set[Rank] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)
    leader: Rank | None = None
    """Who has been asked, or has accepted; None: this node leads."""
    accepted: bool = False
    begun: bool = False
    until_s: float = 0.0
    """Until when the leader's next word is waited for."""


def keeper(node: Node, peers: Sequence[int], key: str) -> int:
    """The living peer that keeps a key's entries: the first in an order that the key draws."""
    order = generator(node.seed, "keeper of a key", zlib.crc32(key.encode())).permutation(max(peers) + 1)
    by_place = sorted(peers, key=lambda j: int(order[j]))
    return next(j for j in by_place if j == node.id or node.fleet.alive(j))


class Matchmaker:
    """One peer's part in matchmaking: it keeps entries, answers who asks, and looks for groups itself.

    peers: all who take part, this one included. min_size: fewest members of a group. request_timeout_s: how
    long an answer is waited for. bandwidth_bytes_per_s, weight: what members are to know of this node.
    """

    def __init__(
        self,
        node: Node,
        peers: Sequence[int],
        *,
        min_size: int = 2,
        request_timeout_s: float = 3.0,
        bandwidth_bytes_per_s: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        self.node, self.peers, self.min_size = node, tuple(peers), min_size
        self.request_timeout_s = request_timeout_s
        self.bandwidth_bytes_per_s, self.weight = bandwidth_bytes_per_s, weight
        self._entries: dict[str, dict[int, Declare]] = {}
        self._search: _Search | None = None
        self._attempts = 0
        node.start(self._answer())

    async def find(self, key: str, size: int, window_s: float) -> Group | None:
        """Look for a group of up to `size` under `key`, as a leader for window_s seconds.

        None where there were too few, or the leader was lost and nobody else was left. Ends within
        window_s and two request time-outs.
        """
        node = self.node
        self._attempts += 1
        attempt = node.life * 1_000_000_000 + self._attempts
        rank = (node.now() + window_s, node.id)
        search = _Search(key, attempt, size, rank, keeper(node, self.peers, key))
        self._search = search
        self._declare(search)
        group = await self._found(search)
        self._search = None
        self._declare(search, looking=False)
        return group

    def _declare(self, search: _Search, looking: bool = True) -> None:
        self.node.send(search.kept_by, Declare(search.key, search.attempt, search.rank[0], looking))

    async def _found(self, s: _Search) -> Group | None:
        """As a leader until the time is up; as a follower until the leader begins, ends or is lost."""
        node = self.node
        while True:
            if s.leader is None and not s.begun:
                if node.now() < s.rank[0]:
                    self._ask_the_earliest(s)
                elif len(s.followers) + 1 >= self.min_size:
                    self._begin(s)
                else:
                    self._dismiss(s, "too few")
                    return None
            until_s = s.rank[0] if s.leader is None and not s.begun else s.until_s
            kinds = (Earlier, Accepted, Refused, Begin, Gone)
            m = await node.receive(*kinds, timeout_s=until_s - node.now(), attempt=s.attempt)
            if isinstance(m, Begin) and (m.sender == node.id or (s.leader and m.sender == s.leader[1])):
                index, leader = m.members.index(node.id), s.rank if s.leader is None else s.leader
                return Group(m.group, m.members, m.bandwidths_bytes_per_s, m.weights, index, leader[0])
            self._heed(s, m)

    def _heed(self, s: _Search, m: Message | None) -> None:
        """Take in one message that does not end the search; None: the leader has said nothing in time."""
        asked = s.leader[1] if s.leader is not None else None
        if isinstance(m, Earlier):
            s.candidates |= set(zip(m.expires_s, m.peers, strict=True))
        elif isinstance(m, Accepted):
            if m.sender == asked and not s.begun:
                s.accepted = True
                assert s.leader is not None
                s.until_s = max(s.leader[0], self.node.now()) + self.request_timeout_s
                self._dismiss(s, "follows another", s.leader)
            else:
                self._join(s, m.sender, leaving=True)
        elif isinstance(m, Refused) and m.sender == asked:
            s.leader, s.accepted = None, False
            if m.leader >= 0 and (m.leader_expires_s, m.leader) < s.rank:
                s.candidates.add((m.leader_expires_s, m.leader))
        elif isinstance(m, Gone):
            s.followers.pop(m.sender, None)
            if m.sender == s.kept_by:
                s.kept_by = keeper(self.node, self.peers, s.key)
                self._declare(s)
            if m.sender == asked:
                s.leader, s.accepted = None, False
        elif m is None and asked is not None and not s.begun:
            self._join(s, asked, leaving=True)
            s.leader, s.accepted = None, False

    def _ask_the_earliest(self, s: _Search) -> None:
        ready = {c for c in s.candidates if c[1] not in s.tried and self.node.fleet.alive(c[1])}
        if ready:
            s.leader = min(ready)
            s.tried.add(s.leader[1])
            s.until_s = self.node.now() + self.request_timeout_s
            self._join(s, s.leader[1])

    def _join(self, s: _Search, leader: int, leaving: bool = False) -> None:
        me = (self.bandwidth_bytes_per_s, self.weight)
        self.node.send(leader, Join(s.key, s.attempt, s.rank[0], *me, leaving))

    def _dismiss(self, s: _Search, reason: str, leader: Rank | None = None) -> None:
        """Send the followers away, to `leader` where there is one."""
        to = (leader[1], leader[0]) if leader is not None else (-1, 0.0)
        for j, join in s.followers.items():
            self.node.send(j, Refused(join.attempt, reason, *to))
        s.followers.clear()

    def _begin(self, s: _Search) -> None:
        """Tell the members, this node among them, that the group is complete."""
        node = self.node
        if s.leader is not None:
            self._join(s, s.leader[1], leaving=True)
            s.leader = None
        s.begun, s.until_s = True, node.now() + self.request_timeout_s
        rng = node.rng("group", s.attempt)
        group = int(rng.integers(2**62))
        own = Join(s.key, s.attempt, s.rank[0], self.bandwidth_bytes_per_s, self.weight)
        joins = {node.id: own, **s.followers}
        members = tuple(int(j) for j in rng.permutation(sorted(joins)))
        bandwidths = tuple(joins[j].bandwidth_bytes_per_s for j in members)
        weights = tuple(joins[j].weight for j in members)
        for j in members:
            node.send(j, Begin(joins[j].attempt, group, members, bandwidths, weights))

    # --- what a peer does for others, at all times ----------------------------------------------------

    async def _answer(self) -> None:
        while True:
            m = await self.node.receive(Declare, Join, Leaving)
            if isinstance(m, Declare):
                self._keep(m)
            elif isinstance(m, Join):
                self._consider(m)
            else:
                self.peers = tuple(j for j in self.peers if j != m.sender)

    def _keep(self, m: Declare) -> None:
        """Enter or remove a declaration, and tell whoever has an earlier one to ask of it."""
        now = self.node.now()
        entries = {j: d for j, d in self._entries.pop(m.key, {}).items() if d.expires_s >= now}
        old = entries.pop(m.sender, None)
        if m.looking:
            mine = (m.expires_s, m.sender)
            earlier = sorted((d.expires_s, j) for j, d in entries.items() if (d.expires_s, j) < mine)
            if earlier:
                times, peers = zip(*earlier, strict=True)
                self.node.send(m.sender, Earlier(m.attempt, peers, times))
            for j, d in entries.items():
                if (d.expires_s, j) > mine:
                    self.node.send(j, Earlier(d.attempt, (m.sender,), (m.expires_s,)))
            entries[m.sender] = m
        elif old is not None and old.attempt > m.attempt:
            entries[m.sender] = old
        if entries:
            self._entries[m.key] = entries

    def _consider(self, m: Join) -> None:
        """Accept an asker as a follower, or say why not and whom to ask."""
        s = self._search
        if m.leaving:
            if s is not None and not s.begun and m.sender in s.followers:
                del s.followers[m.sender]
            return
        if s is None or s.begun:
            refused = Refused(m.attempt, "not looking")
        elif s.key != m.key:
            refused = Refused(m.attempt, "another key")
        elif s.rank >= (m.expires_s, m.sender):
            refused = Refused(m.attempt, "not earlier")
        elif s.accepted and s.leader is not None:
            refused = Refused(m.attempt, "follows another", s.leader[1], s.leader[0])
        else:
            s.followers[m.sender] = m
            self.node.send(m.sender, Accepted(m.attempt))
            if len(s.followers) + 1 == s.size:
                self._begin(s)
            return
        self.node.send(m.sender, refused)
