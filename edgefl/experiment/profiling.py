"""Measuring this machine: its facts, its rates and its operators, as a profile file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from edgefl.allocator import keep_memory
from edgefl.devices import DeviceProfile
from edgefl.devices.energy import open_meter
from edgefl.devices.kernels import Kernels
from edgefl.devices.profiler import Facts, load_average, measure, read_facts
from edgefl.devices.profiler.operators import cases
from edgefl.devices.profiler.rates import accelerator, all_cores, bandwidth, precisions, storage
from edgefl.errors import ConfigError
from edgefl.experiment.toml import write_toml
from edgefl.learning.measuring import block_times, fitted_kernels, step_sample, step_times
from edgefl.learning.model import Model
from edgefl.learning.models import ModelConfig, Problem, build_model
from edgefl.whole import write_whole

BATCH_SIZES = (4, 16, 64)
BLOCK_BATCH = 16
"""Batch size at which the blocks of a model are timed one by one."""
WIDE = 0.25
"""A spread from which a figure says more of what else was going on than of the machine."""
_LEAST_FLOPS = 1e6
Told = Callable[[str, float], None]
"""Called with what is being measured, and the share that is done."""
PROBLEMS = {
    "char-lstm": Problem("language", (80,), 80),
    "transformer": Problem("language", (80,), 80),
    "vgg": Problem("classification", (1, 28, 28), 10),
}
"""What a model named by --model is built for; digits (1, 8, 8) for the others."""


@dataclass(frozen=True)
class MeasuredKernels:
    """kernels: fitted. flops: the median rate of products and convolutions of at least a million operations.
    spreads: by operator. rates: by operator, operations per second."""

    kernels: Kernels
    flops: float
    spreads: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)


def measure_kernels(*, quick: bool = False, told: Told = lambda what, share: None) -> MeasuredKernels:
    """Time all operators, and fit them to the steps of reference networks. One thread."""
    times: dict[str, list[tuple[float, ...]]] = {}
    spreads: dict[str, float] = {}
    rates: dict[str, float] = {}
    large: list[float] = []
    listed = sum(1 for _ in cases(quick))
    with torch.no_grad():
        for i, case in enumerate(cases(quick)):
            name = f"{case.kind} {' x '.join(f'{d:g}' for d in case.dims)}".strip()
            told(name, 0.8 * i / listed)
            sample = measure(case.call, 0.02 if quick else 0.06)
            times.setdefault(case.kind, []).append((*case.dims, sample.quiet_s))
            spreads[name] = sample.spread
            if case.flops:
                rates[name] = case.flops / sample.seconds
            if case.flops >= _LEAST_FLOPS:
                large.append(rates[name])
    told("steps of small networks", 0.8)
    kernels = fitted_kernels({kind: tuple(rows) for kind, rows in times.items()}, 0.1 if quick else 0.4)
    return MeasuredKernels(kernels, statistics.median(large), spreads, rates)


def measure_machine(
    *,
    name: str | None = None,
    model: Model | None = None,
    quick: bool = False,
    told: Told = lambda what, share: None,
    root: Path = Path("/"),
    folder: Path = Path(),
) -> DeviceProfile:
    """Measure this machine, in at most a minute; with `model`, its steps too.

    root: where /sys and /proc lie. folder: where storage is tried. told: hears how far it is.
    """
    before, threads = torch.get_num_threads(), 1
    began, load_before = time.perf_counter(), load_average(root)
    keep_memory()
    torch.set_num_threads(threads)
    try:
        found = read_facts(root)
        kernels = measure_kernels(quick=quick, told=lambda what, share: told(what, 0.6 * share))
        machine, step_times_s = _rest(found, model, quick, told, folder)
    finally:
        torch.set_num_threads(before)
    machine["threads"] = threads
    machine["measured_s"] = round(time.perf_counter() - began, 1)
    machine["load_before"], machine["load_after"] = load_before, load_average(root)
    machine["rates_flops"] = kernels.rates
    machine["spread"] = _spread(kernels.spreads)
    machine["doubts"] = _doubts(machine, found)
    machine["not_offered"] = found.why
    memory = machine["memory_limit_bytes"] or machine["memory_total_bytes"] or _installed_bytes()
    free = machine["memory_free_bytes"] or memory
    title = machine["board"] or platform.node() or "this machine"
    return DeviceProfile(
        name=name or "this-machine",
        title=str(title),
        compute_flops=kernels.flops,
        memory_bytes_per_s=machine["bandwidth_bytes_per_s"],
        memory_bytes=int(min(memory, free)),
        step_overhead_s=machine["step_overhead_s"],
        idle_w=None,
        busy_w=None,
        step_times_s=step_times_s,
        kernels=kernels.kernels,
        machine=machine,
        source=f"edgefl profile on {time.strftime('%Y-%m-%d')}, one thread, torch {torch.__version__}",
    )


def _rest(
    found: Facts, model: Model | None, quick: bool, told: Told, folder: Path
) -> tuple[dict[str, Any], dict[str, dict[int, float]]]:
    """All figures but those of the operators."""
    machine = dict(found.found)
    machine["architecture"] = platform.machine()
    told("memory bandwidth", 0.6)
    machine["bandwidth_bytes_per_s"], _ = bandwidth(
        0.2 if quick else 0.8, 16_000_000 if quick else 64_000_000
    )
    machine["step_overhead_s"] = _smallest_step_s()
    told("precisions", 0.65)
    machine["precisions_flops"] = precisions(0.6 if quick else 3.0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine["cores_allowed"] = cores
    machine["all_cores_flops"] = all_cores(cores, 0.2 if quick else 0.6)
    told("storage", 0.75)
    speeds = storage(folder, 8_000_000 if quick else 64_000_000)
    for key, i in (("storage_write_bytes_per_s", 0), ("storage_read_bytes_per_s", 1)):
        found.put(key, None if speeds is None else speeds[i], f"nothing can be written in {folder}")
        machine[key] = found.found[key]
    told("accelerator", 0.8)
    found.put("accelerator", accelerator(0.5), "PyTorch finds no CUDA device")
    machine["accelerator"] = found.found["accelerator"]
    _power(found, machine, 0.5 if quick else 2.0)
    times: dict[str, dict[int, float]] = {}
    if model is not None:
        told(f"steps of {model.label}", 0.85)
        samples = step_times(model, BATCH_SIZES, 1.0 if quick else 4.0)
        times[model.label] = {size: sample.seconds for size, sample in samples.items()}
        machine["step_spread"] = {str(size): sample.spread for size, sample in samples.items()}
        machine["block_times_s"] = block_times(model, BLOCK_BATCH, 0.5 if quick else 2.0)
    told("done", 1.0)
    return machine, times


def _smallest_step_s() -> float:
    """A step of a model of hardly any arithmetic: all overhead."""
    tiny = build_model(ModelConfig(name="mlp", hidden=(8,)), Problem("classification", (8,), 4), 0)
    return step_sample(tiny, 4, 0.2).seconds


def _power(found: Facts, machine: dict[str, Any], seconds: float) -> None:
    """Watts while a product keeps one core busy, where the machine measures energy."""
    meter = open_meter()
    x = torch.ones(512, 512)
    began = time.perf_counter()
    meter.sample(0.0)
    while meter.joules is not None and time.perf_counter() - began < seconds:
        x @ x
        meter.sample(time.perf_counter() - began)
    joules = meter.joules
    watts = None if joules is None else joules / max(time.perf_counter() - began, 1e-9)
    found.put("power_one_core_w", watts, meter.reason or "no reading")
    machine["power_one_core_w"] = found.found["power_one_core_w"]
    machine["power_source"] = None if watts is None else f"{meter.name} ({meter.covers})"


def _spread(spreads: dict[str, float]) -> dict[str, float]:
    worst = max(spreads, key=lambda name: spreads[name])
    return {"median": statistics.median(spreads.values()), "worst": spreads[worst]}


def _doubts(machine: dict[str, Any], found: Facts) -> list[str]:
    """Why the figures should not be trusted, as sentences; none where they should."""
    doubts = []
    cores = machine["cores_allowed"]
    before = machine["load_before"]
    if before is not None and before > 0.5 * cores:
        doubts.append(f"the machine was busy: load {before:g} on {cores} cores before the first measurement")
    if machine["spread"]["median"] > WIDE:
        doubts.append(f"repeats differ: the middle half spreads over {machine['spread']['median']:.0%}")
    if machine["throttled"]:
        doubts.append("the processor is throttled: cool it, or give it a better power supply")
    if machine["governor"] in ("powersave", "ondemand", "schedutil") and machine["board_kind"] != "other":
        doubts.append(f"the frequency moves with the load (governor {machine['governor']})")
    return doubts


def _installed_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def profiled_model(name: str) -> Model:
    """The model that --model names, with its defaults. Raises ConfigError for an unknown one."""
    problem = PROBLEMS.get(name, Problem("classification", (1, 8, 8), 10))
    return build_model(ModelConfig(name=name), problem, 0)


def write_profile(profile: DeviceProfile, path: Path) -> None:
    """Write a profile where [fleet] devices can name it. Raises ConfigError for another ending."""
    table = profile.model_dump(exclude={"sources"} | ({"name"} if path.suffix == ".toml" else set()))
    if path.suffix == ".json":
        write_whole(path, json.dumps(table, indent=1) + "\n")
        return
    if path.suffix != ".toml":
        raise ConfigError("--out", str(path), "a file that ends with .toml or .json")
    write_whole(path, write_toml(_without_none(table)))


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: what is None is left out, and named under machine.not_offered."""
    kept = {}
    for key, value in table.items():
        if isinstance(value, dict):
            kept[str(key)] = _without_none(value)
        elif value is not None:
            kept[str(key)] = value
    return kept


def table_rows(profile: DeviceProfile) -> Sequence[tuple[str, str]]:
    """The figures that people look for, as (name, value)."""
    from edgefl.experiment.report.units import scaled, seconds

    machine = profile.machine
    rows = [
        ("machine", f"{profile.title}, {machine['architecture']}, {machine['cores_allowed']} cores"),
        ("system", f"{machine['system']}{', in a container' if machine['container'] else ''}"),
        ("training rate, one thread", scaled(profile.compute_flops, "FLOP/s")),
        ("product on all cores", scaled(machine["all_cores_flops"], "FLOP/s")),
        ("memory bandwidth", scaled(profile.memory_bytes_per_s, "B/s")),
        ("memory to train in", scaled(profile.memory_bytes, "B")),
        ("smallest step", seconds(profile.step_overhead_s)),
        ("storage, written and read", f"{scaled(machine['storage_write_bytes_per_s'], 'B/s')},"
         f" {scaled(machine['storage_read_bytes_per_s'], 'B/s')}"),
        ("spread, median and worst", f"{machine['spread']['median']:.0%}, {machine['spread']['worst']:.0%}"),
    ]  # fmt: skip
    for label, times in profile.step_times_s.items():
        rows += [(f"step of {label}, batch {size}", seconds(t)) for size, t in times.items()]
    blocks = machine.get("block_times_s", {})
    rows += [(f"block {name}, batch {BLOCK_BATCH}", seconds(t)) for name, t in blocks.items()]
    rows += [("not offered", f"{key}: {why}") for key, why in machine["not_offered"].items()]
    return rows
