"""When a save is written, and when its messages are covered."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgefl.runtimes.grpc.keeper import RECORDS_EVERY_S, Keeper
from edgefl.runtimes.grpc.state import StateFolder, StateLost


class Transport:
    """Hands over what a test puts into `news`, and notes what is covered."""

    def __init__(self) -> None:
        self.news: list[Any] = []
        self.covered: list[Any] = []
        self.kept_bytes = 0

    def handed_over(self, waiting: object) -> list[Any]:
        news, self.news = self.news, []
        return news

    def cover(self, handed: list[Any]) -> None:
        self.covered += handed


class Host:
    """A clock that a test moves; what is to happen happens in `settle`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.later: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def clock(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.later.append((self.now + delay_s, call, args))

    def call_from_thread(self, call: Callable[..., None], *args: Any) -> None:
        self.later.append((self.now, call, args))

    def settle(self, done: Callable[[], bool]) -> None:
        """Let everything that is due happen until `done`."""
        deadline = time.monotonic() + 5
        while not done():
            assert time.monotonic() < deadline
            due = [one for one in self.later if one[0] <= self.now]
            self.later = [one for one in self.later if one[0] > self.now]
            for _, call, args in due:
                call(*args)
            time.sleep(0.001)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Keeper, Transport, Host]:
    folder = StateFolder(tmp_path, "run", "digest")
    folder.begin()
    transport, host = Transport(), Host()
    return Keeper(folder, transport, host, most_bytes=100), transport, host  # type: ignore[arg-type]


def content(round: int) -> dict[str, Any]:
    return {"saved": {"round": round}, "report": {}}


def written(keeper: Keeper) -> int | None:
    loaded = keeper.folder.load({})
    return None if loaded is None else loaded["saved"]["round"]


def test_a_save_waits_for_what_was_sent_before_it(parts: tuple[Keeper, Transport, Host]) -> None:
    keeper, transport, host = parts
    first, second = keeper.sent(), keeper.sent()
    transport.news = ["a"]
    keeper.saved(content(1), ())
    third = keeper.sent()
    keeper.settled(second)
    assert not host.later and written(keeper) is None
    keeper.settled(first)  # the third was sent after the save
    host.settle(lambda: transport.covered == ["a"])
    assert written(keeper) == 1
    keeper.settled(third)
    keeper.close(over=True)
    assert written(keeper) is None


def test_the_newest_save_is_written_when_the_disk_has_had_a_pause(
    parts: tuple[Keeper, Transport, Host],
) -> None:
    keeper, transport, host = parts
    for round in range(1, 4):
        transport.news = [round]
        keeper.saved(content(round), ())
        host.settle(lambda: transport.covered == [1])
    assert written(keeper) == 1
    host.now = 0.6
    host.settle(lambda: transport.covered == [1, 2, 3])
    assert written(keeper) == 3
    keeper.saved(content(4), ())
    keeper.close(over=False)
    assert written(keeper) == 4


def test_without_anything_to_save_receipts_go_at_once(parts: tuple[Keeper, Transport, Host]) -> None:
    keeper, transport, host = parts
    transport.news = ["a"]
    keeper.saved(None, ())
    assert transport.covered == ["a"] and not host.later
    assert not keeper.wants_records
    host.now = RECORDS_EVERY_S
    assert keeper.wants_records
    keeper.close(over=True)


def test_what_the_others_keep_is_bounded(parts: tuple[Keeper, Transport, Host]) -> None:
    keeper, transport, _ = parts
    transport.news, transport.kept_bytes = ["a"], 100
    keeper.arrived()
    assert not transport.covered
    transport.kept_bytes = 101
    keeper.arrived()
    assert transport.covered == ["a"]
    keeper.close(over=False)
    assert not StateFolder(keeper.folder.path, "run", "digest").complete


def test_a_save_that_is_waited_for_is_written_without_a_rest(parts: tuple[Keeper, Transport, Host]) -> None:
    """Two of them at one instant, where the disk would else have half a second between files."""
    keeper, _, host = parts
    called: list[int] = []
    for round in (1, 2):
        sent = keeper.sent()
        keeper.saved(content(round), (), lambda round=round: called.append(round))  # type: ignore[misc]
        assert called == list(range(1, round))
        keeper.settled(sent)
        host.settle(lambda round=round: called == list(range(1, round + 1)))  # type: ignore[misc]
        assert written(keeper) == round and host.now == 0.0


def test_a_disk_that_is_full_ends_it_with_what_it_held_before(
    parts: tuple[Keeper, Transport, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, transport, host = parts
    transport.news = ["a"]
    keeper.saved(content(1), ())
    host.settle(lambda: transport.covered == ["a"])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("edgefl.whole.os.replace", full)
        transport.news, host.now = ["b"], 1.0
        keeper.saved(content(2), ())
        with pytest.raises(StateLost, match=r"No space left.*the same command goes on"):
            host.settle(lambda: False)
        keeper.saved(content(3), ())
        keeper.close(over=False)
    assert written(keeper) == 1 and transport.covered == ["a"], "what it did not keep is sent again"
