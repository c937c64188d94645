"""Who belongs to a site, as one of its learners knows it, when learners crash and return.

Members are in the order in which they came: the first that lives is the head. A member that is gone is lost
to all, for the life that it had. One that returns stands outside and says so to all others (Return); the head
takes it in when it next says who the members are. Where all who live stand outside, they tell each other in
the same way, and who is furthest begins the site anew. One that hears nothing for long goes on alone and says
so: whoever has taken it in meanwhile loses it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.nodes import Back, Gone, Message, Node


@dataclass(frozen=True)
class Return(Message):
    """Its sender has returned, with the model of `step`, and wants to be taken in; not `joins`: no more.

    asked: the life whose own Return it answers; -1: none.
    """

    step: int
    joins: bool
    asked: int = -1


NEWS = Return, Gone, Back


class Members:
    """ids: the members in the order in which they came, this node among them unless it stands outside.

    lives: the least life of each learner of the site that counts. returned: who stands outside and asks.
    changed: a member was lost, the last of them `lost`, and the head has not said yet how the site goes on.
    """

    def __init__(self, node: Node, everybody: list[int]) -> None:
        self.node, self.ids = node, list(everybody)
        self.lives = dict.fromkeys(everybody, 0)
        self.returned: set[int] = set()
        self.changed = self.alone = False
        self.lost = -1

    @property
    def others(self) -> list[int]:
        return [j for j in self.ids if j != self.node.id]

    @property
    def leads(self) -> bool:
        return bool(self.ids) and self.ids[0] == self.node.id

    def living(self) -> list[int]:
        """The other learners of the site that live, members or not, ascending."""
        return list(self.node.fleet.living([j for j in sorted(self.lives) if j != self.node.id]))

    def hear(self, m: Message | None) -> None:
        """Take in news of a learner; and lose those that are gone, whether or not there was news of them."""
        if m is not None and m.sender in self.lives and not self.alone:
            if isinstance(m, Back | Return) and m.life > self.lives[m.sender]:
                self.lose(m.sender)
                self.lives[m.sender] = m.life
            if isinstance(m, Return) and m.life == self.lives[m.sender]:
                self._wants(m.sender, m.joins)
        for j in self.others:
            if not self.node.fleet.alive(j):
                self.lose(j)
        self.returned = set(self.node.fleet.living(sorted(self.returned)))

    def _wants(self, j: int, joins: bool) -> None:
        if not joins:
            self.lose(j)
        elif j not in self.ids:
            self.returned.add(j)

    def lose(self, j: int) -> None:
        """A learner is gone, or wants to be no member; a message of that life counts no more."""
        self.returned.discard(j)
        if j in self.ids:
            self.ids.remove(j)
            self.lives[j] += 1
            self.changed, self.lost = True, j

    def go_alone(self) -> None:
        """Be a site of one from now on."""
        self.ids, self.alone = [self.node.id], True
        self.returned.clear()

    def admit(self) -> None:
        """Take in all who ask for it."""
        self.ids += sorted(self.returned)
        self.returned.clear()
        self.changed = False

    def adopt(self, ids: tuple[int, ...], lives: tuple[int, ...]) -> None:
        """The members as a head names them, with their lives; but for those that were lost since."""
        for j in set(self.ids) - set(ids):
            self.lives[j] += 1
        self.ids = [j for j, life in zip(ids, lives, strict=True) if life >= self.lives[j]]
        self.lives.update({j: life for j, life in zip(ids, lives, strict=True) if j in self.ids})
        self.returned -= set(self.ids)
        self.changed = len(self.ids) < len(ids)

    def counts(self, m: Message, ids: tuple[int, ...], lives: tuple[int, ...]) -> bool:
        """Whether a head's word on who the members are means this life, and is its sender's last life's."""
        named = dict(zip(ids, lives, strict=True)).get(self.node.id) == self.node.life
        return named and self.node.fleet.alive(m.sender) and m.life >= self.lives[m.sender]
