"""Bandwidth, precisions, storage, and the accelerator of this machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from edgefl.devices.profiler.timing import Sample, measure, summarised

_BANDWIDTH_BYTES = 64_000_000
_PRECISIONS = ("float32", "bfloat16", "float16")
_PRODUCT, _IMAGE = 256, (8, 32, 16, 16)


def bandwidth(budget_s: float, most_bytes: int = _BANDWIDTH_BYTES) -> tuple[float, Sample]:
    """Bytes read and written per second by one thread that adds two arrays too large for the caches."""
    n = max(1, most_bytes // 4)
    x, y, z = (torch.ones(n) for _ in range(3))
    sample = measure(lambda: torch.add(x, y, out=z), budget_s)
    return 12.0 * n / sample.seconds, sample


def precisions(budget_s: float) -> dict[str, dict[str, Any]]:
    """Rates of products and convolutions by precision, forward and backward; None where it is not offered."""
    found: dict[str, dict[str, Any]] = {}
    for name in _PRECISIONS:
        dtype = getattr(torch, name)
        for kind, make in (("matmul", _product), ("conv", _convolution)):
            forward, backward, flops = make(dtype)
            each = budget_s / (4 * len(_PRECISIONS))
            found[f"{kind}_{name}"] = {
                "forward_flops": _rate(forward, flops, each),
                "backward_flops": _rate(backward, 2 * flops, each),
            }
    return found


def _rate(call: Callable[[], object], flops: float, budget_s: float) -> float | None:
    try:
        return flops / measure(call, budget_s, least=3).seconds
    except RuntimeError:  # how torch says that it has no such kernel here
        return None


def _product(dtype: torch.dtype) -> tuple[Callable[[], object], Callable[[], object], float]:
    x, y = (torch.ones(_PRODUCT, _PRODUCT, dtype=dtype) for _ in range(2))
    return lambda: x @ y, lambda: (x @ y.t(), x.t() @ y), 2.0 * _PRODUCT**3


def _convolution(dtype: torch.dtype) -> tuple[Callable[[], object], Callable[[], object], float]:
    x = torch.ones(_IMAGE, dtype=dtype).to(memory_format=torch.channels_last)
    channels = _IMAGE[1]
    weight = torch.ones(channels, channels, 3, 3, dtype=dtype)
    back, flops = torch.ops.aten.convolution_backward, 2.0 * 9 * channels * x.numel()
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    return lambda: functional.conv2d(x, weight, padding=1), lambda: back(x, x, weight, *rest), flops


def all_cores(cores: int, budget_s: float) -> float | None:
    """float32 operations per second of a product on all cores together, by the wall clock."""
    before = torch.get_num_threads()
    x = torch.ones(768, 768)
    try:
        torch.set_num_threads(cores)
        x @ x
        taken: list[float] = []
        end = time.perf_counter() + budget_s
        while len(taken) < 3 or time.perf_counter() < end:
            began = time.perf_counter()
            x @ x
            taken.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return 2.0 * 768**3 / summarised(taken).seconds


def storage(folder: Path, size: int) -> tuple[float, float] | None:
    """Bytes per second written, down to the disk, and read back; None where nothing can be written.

    The system may still hold what is read back, where it does not follow the advice to let it go.
    """
    block = os.urandom(1_000_000)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".edgefl-profile-") as file:
            began = time.perf_counter()
            for _ in range(max(1, size // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written_s = time.perf_counter() - began
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total = file.tell()
            file.seek(0)
            began = time.perf_counter()
            while file.read(1_000_000):
                pass
            read_s = time.perf_counter() - began
    except OSError:
        return None
    return total / written_s, total / max(read_s, 1e-9)


def accelerator(budget_s: float) -> dict[str, Any] | None:
    """Name, memory and float32 rate of the first CUDA device; None where PyTorch finds none."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    x = torch.ones(2048, 2048, device="cuda")

    def product() -> None:
        x @ x
        torch.cuda.synchronize()

    product()
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < 5 or time.perf_counter() < end:
        began = time.perf_counter()
        product()
        taken.append(time.perf_counter() - began)
    return {
        "name": torch.cuda.get_device_name(0),
        "memory_total_bytes": total,
        "memory_free_bytes": free,
        "matmul_flops": 2.0 * 2048**3 / summarised(taken).seconds,
    }
