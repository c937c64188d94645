"""Running an experiment: from the file to a folder with results."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgefl.errors import ConfigError, RunError, nearest
from edgefl.experiment.build import Built, build
from edgefl.experiment.checkpoints import run_virtual
from edgefl.experiment.config import Experiment, load_experiment
from edgefl.experiment.folder import RunFolder, alone
from edgefl.experiment.hosts import Hosts, Housing
from edgefl.experiment.observer import RunObserver
from edgefl.experiment.origin import commit, machine, versions
from edgefl.experiment.prediction import beside
from edgefl.experiment.progress import Progress, Reporter
from edgefl.experiment.summary import summarise, write_results
from edgefl.experiment.threads import one_thread
from edgefl.runtimes.outcome import INTERRUPTED, Outcome

if TYPE_CHECKING:
    from edgefl.runtimes.grpc.place import Place

RUNTIMES = ("virtual", "local")
RUNS = Path("runs")
PREFIX_TABLES = ("metrics", "curve", "evaluations")
"""Tables that an interrupted run leaves, and that its repetition must begin with."""
TABLES_BYTES = 512 * 1024
"""Room for the summary, the nodes, the curve and other small tables of a run on the wall clock."""


Execute = Callable[[RunObserver], Outcome]
"""Runs a plan to its end."""


class _Incomplete(RunError):
    """A run has ended, and its folder holds what there was room for."""


@dataclass(frozen=True)
class RunResult:
    """folder: the run's folder; summary: what its run.json sums up."""

    folder: Path
    summary: dict[str, Any]


def run_experiment(
    experiment: Experiment,
    *,
    runtime: str = "virtual",
    out: Path | None = None,
    progress: Progress | None = None,
    processes: bool = False,
    housing: Housing | None = None,
    keep_events: bool = True,
    profiled: bool = False,
    predict: bool = True,
) -> RunResult:
    """Run an experiment and write its folder, runs/DATE-NAME-METHOD-SEED unless `out` names one.

    processes: with the local runtime, a process for each node. housing: makes the network on which these
    processes live, in place of loopback. keep_events: whether spans and events
    are kept, which the timeline needs. profiled: leave a profile of the testbed's own time (virtual only).
    predict: put what virtual time predicts beside what a run on the wall clock came to.
    Raises ConfigError before anything is written; RunError when the run fails, after its folder says so.
    """
    if runtime not in RUNTIMES:
        raise ConfigError("--runtime", runtime, nearest(runtime, RUNTIMES))
    if processes and runtime != "local":
        raise ConfigError("--processes", True, "it goes with --runtime local")
    if housing is not None and runtime != "local":
        raise ConfigError("--lab", True, "it goes with --runtime local")
    built = build(experiment)
    if runtime != "virtual":
        _refuse_endless(built)
    record = _new_record(built, runtime)
    text = built.experiment.to_toml()
    with ExitStack() as stack:
        hosts = None if housing is None else stack.enter_context(housing(built.plan.network))
        if hosts is not None:
            record["network"]["lab"] = dict(hosts.about)
        room_bytes = 0 if runtime == "virtual" else _room_bytes(built)
        if out is not None:
            folder = RunFolder.create(Path(out), text, record, room_bytes=room_bytes)
        else:
            name = _folder_name(built.experiment)
            folder = RunFolder.create_in(RUNS, name, text, record, room_bytes=room_bytes)
        stack.enter_context(alone(folder.path, "--out"))
        execute = _execute(folder, built, runtime, processes, profiled, hosts)
        return _run_in(folder, built, record, progress, keep_events, execute, predict=predict)


def lead(
    built: Built,
    place: Place,
    execute: Execute,
    *,
    out: Path | None,
    going_on: bool,
    progress: Progress | None = None,
) -> RunResult:
    """Run the process that leads a fleet, and write the run's folder, runs/RUN_ID unless `out` names one.

    execute: runs the place to its end. going_on: with the folder that an earlier life of the process left.
    Raises as `run_experiment` does.
    """
    _refuse_endless(built)
    if going_on:
        folder = RunFolder.open(out or RunFolder.latest(RUNS, place.run_id), "--out")
        record = folder.record
        record |= {"status": "running", "reason": None, "error": None, "ended": None}
        folder.write_record(record)
        folder.hold_room(_room_bytes(built))
    else:
        record, room_bytes = _new_record(built, "fleet"), _room_bytes(built)
        text = built.experiment.to_toml()
        if out is not None:
            folder = RunFolder.create(out, text, record, room_bytes=room_bytes)
        else:
            folder = RunFolder.create_in(RUNS, place.run_id, text, record, room_bytes=room_bytes)
    with alone(folder.path, "--out"):
        away = not place.on_loopback
        return _run_in(folder, built, record, progress, True, execute, place.hosted, own_devices=away)


def resume(folder: Path, progress: Progress | None = None, *, keep_events: bool = True) -> RunResult:
    """Go on with a run that was interrupted or failed.

    A run in virtual time goes on from its checkpoint (execution.checkpoint_s), or else is repeated from
    its seed, which gives the same run again; tables that are on disk must be the beginning of the new
    ones. Raises ConfigError for another folder, or a run that is complete; RunError where the repetition
    differs (another version of edgefl or torch).
    """
    with alone(RunFolder.open(Path(folder), "--resume").path, "--resume"):
        return _go_on(folder, progress, keep_events)


def _go_on(folder: Path, progress: Progress | None, keep_events: bool) -> RunResult:
    run_folder = RunFolder(Path(folder))
    record = run_folder.record
    status, runtime = record.get("status"), record.get("runtime")
    if status in ("finished", "stopped"):
        raise ConfigError("--resume", str(folder), f"a run that was cut short; this one {status}")
    if runtime != "virtual":
        raise ConfigError("--resume", str(folder), f"a virtual run; this one's run.json says {runtime!r}")
    built = build(load_experiment(run_folder.path / "experiment.toml"))
    record |= dict.fromkeys(("reason", "error", "ended", "summary"))
    record |= {"status": "running", "versions": versions()}
    run_folder.write_record(record)
    execute = _execute(run_folder, built, "virtual", False, False)
    return _run_in(run_folder, built, record, progress, keep_events, execute)


def _room_bytes(built: Built) -> int:
    """What to keep free for the results of a run that cannot be repeated: the model, and small tables."""
    return TABLES_BYTES + built.learner.model.init().nbytes


def _refuse_endless(built: Built) -> None:
    """Where each process sees its own models only, a target that is the fleet's is found after the run."""
    stop = built.experiment.stop
    if built.plan.method.evaluates != "server" and stop.rounds is None and stop.time_s is None:
        accepted = f"with {built.plan.method.name} over gRPC no target can end the run: give rounds or time_s"
        raise ConfigError("stop", None, accepted)


def _run_in(
    folder: RunFolder,
    built: Built,
    record: dict[str, Any],
    progress: Progress | None,
    keep_events: bool,
    execute: Execute,
    hosted: tuple[int, ...] = (0,),
    predict: bool = True,
    own_devices: bool = False,
) -> RunResult:
    """Run, and leave the folder with the run's status, whatever comes.

    own_devices: the run is over machines that are the file's devices, as far as can be known.
    """
    is_virtual = record["runtime"] == "virtual"
    status, observer = "failed", None
    try:
        report = _begin(built, progress)
        observer = RunObserver(built, report, hosted=None if is_virtual else hosted, keep_events=keep_events)
        with one_thread():
            outcome = execute(observer)
            observer.final(outcome)
        status = outcome.status
        if is_virtual:
            _check_prefix(folder, observer)
        summary = summarise(built, observer, outcome, record["runtime"], folder.path, report.wall_s)
        folder.use_room()
        unwritten = write_results(folder, built, observer, outcome)
        if predict and not is_virtual and outcome.reason != INTERRUPTED:
            same = own_devices or built.experiment.execution.emulate
            summary["predicted"], rows = beside(
                built, outcome, observer.paces, observer.measured_j, same_devices=same
            )
            with unwritten.tried():
                folder.write_table("predicted", rows)
        if observer.links:
            record["links"] = dict(sorted(observer.links.items()))
        if outcome.reason == INTERRUPTED:
            status = summary["status"] = INTERRUPTED
        if unwritten.errors:
            status = "failed"
            _write_last(folder, _ended(record, status, str(unwritten), summary))
            raise _Incomplete(f"{folder.path}: {unwritten}; the rest is there{_goes_on(is_virtual)}")
        folder.write_record(_ended(record, status, outcome.reason, summary))
    except KeyboardInterrupt as error:
        status = INTERRUPTED
        _leave(folder, record, status, "interrupted by the user", observer, None)
        if is_virtual:
            error.add_note(f"edgefl run --resume {folder.path} goes on")
        raise
    except _Incomplete:
        raise
    except OSError as error:
        status = "failed"
        _leave(folder, record, status, f"the folder cannot be written: {error.strerror}", observer, error)
        problem = f"{folder.path} cannot be written ({error.strerror}){_goes_on(is_virtual)}"
        raise RunError(problem) from error
    except Exception as error:
        status = "failed"
        _leave(folder, record, status, str(error), observer, error)
        raise
    finally:
        if progress is not None:
            progress.end(status)
    _write_views(folder)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    return RunResult(folder.path, summary)


def _begin(built: Built, progress: Progress | None) -> Reporter:
    """Tell who watches what begins; returns what tells them the rest."""
    stop = built.experiment.stop
    target = stop.target.value if stop.target else None
    if progress is not None:
        progress.begin(
            _description(built),
            time_s=stop.time_s,
            rounds=stop.rounds,
            metric=built.metric,
            target=target,
        )
    return Reporter(progress, target)


def _execute(
    folder: RunFolder,
    built: Built,
    runtime: str,
    processes: bool,
    profiled: bool,
    hosts: Hosts | None = None,
) -> Execute:
    """What hands the plan to a runtime."""
    if runtime == "virtual":
        return lambda observer: run_virtual(folder, built, observer, profiled=profiled)

    def execute(observer: RunObserver) -> Outcome:
        from edgefl.experiment import local  # gRPC is loaded where it is used

        if processes or hosts is not None:
            return local.run_processes(folder.path, built, observer, hosts)
        return local.run_here(folder.path, built, observer)

    return execute


def _check_prefix(folder: RunFolder, observer: RunObserver) -> None:
    """What an earlier attempt left must be the beginning of this one's tables."""
    for name in PREFIX_TABLES:
        if not folder.begins(name, getattr(observer, name)):
            raise RunError(
                f"{folder.path}/{name}.csv is not the beginning of the same run: "
                "other versions or another machine? run it anew with its experiment.toml"
            )


def _leave(
    folder: RunFolder,
    record: dict[str, Any],
    status: str,
    reason: str,
    observer: RunObserver | None,
    error: BaseException | None,
) -> None:
    """Write what there is of a run that did not end well; a full disk takes the status alone."""
    shown = None if error is None else "".join(traceback.format_exception(error))
    folder.use_room()
    try:
        folder.write_record(_ended(record | {"error": shown}, status, reason, None))
    except OSError:
        with suppress(OSError):
            folder.overwrite_record(_ended(record, status, reason, None))
        return
    with suppress(OSError):
        for name in (*PREFIX_TABLES, "events") if observer is not None else ():
            folder.write_table(name, getattr(observer, name))


def _write_last(folder: RunFolder, record: dict[str, Any]) -> None:
    """Write run.json as far as a full disk lets: beside the old one, over it, or without the summary."""
    try:
        folder.write_record(record)
    except OSError:
        with suppress(OSError):
            folder.overwrite_record(record) or folder.overwrite_record(record | {"summary": None})


def _goes_on(is_virtual: bool) -> str:
    return "; --resume it later" if is_virtual else ""


def _ended(
    record: dict[str, Any], status: str, reason: str, summary: dict[str, Any] | None
) -> dict[str, Any]:
    """What run.json says of a run that has ended."""
    return record | {"status": status, "reason": reason, "ended": _wall_time(), "summary": summary}


def _write_views(folder: RunFolder) -> None:
    """The report and the timeline, made from the folder's files alone."""
    from edgefl.experiment.report import write_report
    from edgefl.experiment.trace import write_trace

    again = f"edgefl report {folder.path}, edgefl export {folder.path}"
    try:
        write_report(folder.path)
        write_trace(folder.path)
    except OSError as error:
        problem = f"the run is over, but its report cannot be written ({error.strerror}): {again}"
        raise RunError(problem) from error
    except KeyboardInterrupt as error:
        error.add_note(f"the run is over, and lacks its report: {again}")
        raise


def _new_record(built: Built, runtime: str) -> dict[str, Any]:
    network = built.plan.network
    return {
        "status": "running",
        "reason": None,
        "name": built.experiment.name,
        "runtime": runtime,
        "versions": versions(),
        "commit": commit(),
        "machine": machine(),
        "network": {"topology": network.topology.name, "link_model": network.link_model},
        "started": _wall_time(),
        "ended": None,
        "error": None,
        "summary": None,
    }


def _wall_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _folder_name(experiment: Experiment) -> str:
    date = datetime.now().strftime("%Y-%m-%d")
    words = (date, experiment.name, experiment.method.method.name, str(experiment.seed))
    return "-".join(re.sub(r"[^\w.+-]+", "-", word) for word in words)


def _description(built: Built) -> str:
    return f"{built.plan.method.name} on {len(built.plan.nodes)} nodes, seed {built.plan.seed}"
