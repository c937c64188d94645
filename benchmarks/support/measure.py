"""Measuring side by side, and saying what came out.

Every figure is a ratio of two things that ran in the same minute on the same machine: the cases of a
comparison take turns, so that a neighbour's load meets all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Line:
    """One finding. value: in `unit`; ratio: against `against`, the plain alternative of the same run.

    least, aim: what the ratio (the value, where there is no ratio) should at least be, and should be;
    smaller_is_better: then these are the most.
    """

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    least: float | None = None
    aim: float | None = None
    smaller_is_better: bool = False

    @property
    def verdict(self) -> str:
        """aim, least or missed; nothing where no target was set."""
        if self.least is None or self.aim is None:
            return ""
        found = self.value if self.ratio is None else self.ratio
        if self.smaller_is_better:
            return "aim" if found <= self.aim else "least" if found <= self.least else "missed"
        return "aim" if found >= self.aim else "least" if found >= self.least else "missed"


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="one JSON object per line, nothing else")
    made.add_argument("--repeats", type=int, default=5, help="turns of each case; medians are shown")
    made.add_argument("--only", default="", help="the cases whose names contain this")
    return made


def arguments(description: str) -> argparse.Namespace:
    """What the command line chose of them."""
    return parser(description).parse_args()


def interleaved(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median of each case's own measure; the cases take turns, after one turn that does not count."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, case in cases.items():
            gc.collect()
            value = case()
            if turn:
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def show(lines: Sequence[Line], as_json: bool) -> None:
    """Print a table, or a JSON object per line."""
    if as_json:
        for line in lines:
            print(json.dumps(asdict(line) | {"verdict": line.verdict, "load": os.getloadavg()[0]}))
        return
    width = max(len(line.name) for line in lines)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:10.3g} x {line.against}"
        target = "" if line.least is None else f"(least {line.least:g}, aim {line.aim:g}: {line.verdict})"
        print(f"{line.name:<{width}}  {line.value:12,.4g} {line.unit:<14} {ratio} {target}".rstrip())


@contextmanager
def one_thread() -> Iterator[None]:
    """torch with one thread, for every case alike."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
