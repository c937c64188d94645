"""The state folder, and messages that their senders keep until a save covers them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
import torch
from grpc_lab import CODEC, LAYOUT, Word, model, process, run, until

from edgefl.errors import ConfigError, RunError
from edgefl.runtimes.grpc import state as state_module
from edgefl.runtimes.grpc.local import free_addresses
from edgefl.runtimes.grpc.state import StateFolder


def opened(path: Path, run_id: str = "run") -> StateFolder:
    folder = StateFolder(path, run_id, "digest")
    folder.begin()
    return folder


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    vector = model(3).parameters
    saved = {
        "x": vector,
        "state": (torch.tensor([1.5, float("nan")]), torch.tensor(7, dtype=torch.int64)),
        "turns": {3: 1, 5: 2},
        "nothing": None,
        "raw": b"\x00\xff",
        "none": b"",
        "names": ["a", {"deep": (True, 0.1)}],
    }
    folder = opened(tmp_path)
    folder.write({"saved": saved, "time_s": 2.5})
    content = StateFolder(tmp_path, "run", "digest").load(CODEC.layouts)
    assert content is not None and content["time_s"] == 2.5
    back = content["saved"]
    assert back["x"].equal(vector) and back["x"].layout is LAYOUT
    assert torch.equal(back["state"][0], saved["state"][0]) is False  # a NaN equals nothing
    assert back["state"][0].tolist()[0] == 1.5 and back["state"][0].isnan().tolist() == [False, True]
    assert back["state"][1].shape == () and int(back["state"][1]) == 7
    assert {k: back[k] for k in ("turns", "nothing", "raw", "none", "names")} == {
        k: saved[k] for k in ("turns", "nothing", "raw", "none", "names")
    }


def test_each_life_has_a_higher_number_until_the_run_is_over(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert StateFolder(tmp_path, "run", "digest").life == 1
    second = opened(tmp_path)
    assert (first.life, second.life, second.began_s, second.complete) == (0, 1, first.began_s, True)
    second.give_up()
    assert not opened(tmp_path).complete
    second.clear()
    assert opened(tmp_path).life == 0


def test_the_time_of_a_pause_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path).pause(5.0)
    later_s = time.time() + 3600
    monkeypatch.setattr(state_module.time, "time", lambda: later_s)
    resumed = opened(tmp_path)
    assert resumed.began_s == later_s - 5.0
    assert StateFolder(tmp_path, "run", "digest").began_s == later_s - 5.0


def test_a_foreign_or_damaged_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = opened(tmp_path)
    with pytest.raises(ConfigError, match="belongs to run 'run'"):
        StateFolder(tmp_path, "other", "digest")
    folder.write({"saved": {"x": torch.zeros(1000)}})
    file = tmp_path / "state.safetensors"
    monkeypatch.setattr(state_module, "MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="at most 1000 are read"):
        folder.load({})
    monkeypatch.undo()
    whole = file.read_bytes()
    for damaged in (whole[:100], b"", b"\xff" * 100, whole[:8] + b"[" + whole[9:]):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="this node's own state is needed"):
            folder.load({})
    (tmp_path / "life.json").write_text(json.dumps({"run_id": "run"}))
    with pytest.raises(ConfigError, match="remove the folder to begin anew"):
        StateFolder(tmp_path, "run", "digest")


def test_what_cannot_be_stored_is_named_and_changes_nothing(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.write({"saved": {"round": 1}})
    with pytest.raises(RunError, match=r"saved\.saved\.x\[1\] is of type object"):
        folder.write({"saved": {"x": [1, object()]}})
    assert folder.load({}) == {"saved": {"round": 1}}


def test_messages_are_sent_again_until_they_are_covered() -> None:
    async def program() -> None:
        addresses = free_addresses(2)
        a, b = process(0, addresses), process(1, addresses, keeps=True)
        await asyncio.gather(a.transport.start(), b.transport.start())
        try:
            for number in range(3):
                await a.deliver(0, 1, Word(number))
            await a.deliver(0, 1, model(9))
            handed = b.transport.handed_over([b.messages[1][1]])  # the second one is unread
            assert b.transport.kept_bytes == 2_000_000
            b.transport.cover(handed[:1])
            outbox = a.transport._peers[1].outbox
            await until(lambda: len(outbox.kept) == 3)
            assert outbox.quiet.is_set()
        finally:
            await b.transport.close(farewell=False)
        again = process(1, addresses, keeps=True, life=1)
        try:
            await again.transport.start()
            await until(lambda: len(again.messages) == 3)
            words = [m.number for _, m in again.messages if isinstance(m, Word)]
            assert words == [1, 2]
            assert [m.round for _, m in again.messages if not isinstance(m, Word)] == [9]
            again.transport.cover(handed)  # of the earlier life: nothing
            again.transport.cover(again.transport.handed_over(()))
            await until(lambda: not outbox.kept)
            assert [error for _, error in a.delivered] == [None] * 4
            assert a.back == [(1, 1)] and a.gone == []
        finally:
            await asyncio.gather(a.transport.close(), again.transport.close())

    run(program)


def test_a_returned_process_waits_for_nobody_and_misses_who_stays_away() -> None:
    async def program() -> None:
        from grpc_lab import LIMITS

        addresses = free_addresses(2)
        limits = LIMITS.__class__(grace_s=0.1)
        b = process(1, addresses, life=1, limits=limits)
        await b.transport.start()
        try:
            await until(lambda: b.gone == [0])
        finally:
            await b.transport.close()

    run(program)
