import pytest
import torch

from edgefl.devices.kernels import KINDS
from edgefl.devices.profiler import measure, summarised
from edgefl.devices.profiler.operators import cases
from edgefl.devices.profiler.rates import all_cores, bandwidth, precisions, storage


def test_medians_quartiles_and_spread():
    sample = summarised([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (sample.seconds, sample.quiet_s, sample.repeats) == (3.0, 2.0, 5)
    assert sample.spread == pytest.approx(2 / 3)
    assert summarised([2.0]).spread == 0


def test_twice_the_work_takes_about_twice_the_time():
    def work(n):
        return measure(lambda: sum(range(n)), 0.05).quiet_s

    assert work(40_000) / work(20_000) == pytest.approx(2, rel=0.4)


def test_every_kind_of_operator_is_timed_with_its_dimensions():
    seen = set()
    for case in cases(quick=True):
        assert len(case.dims) == len(KINDS[case.kind][0]) and min(case.dims, default=1) > 0
        if case.kind not in seen:
            with torch.no_grad():
                case.call()
        seen.add(case.kind)
    assert seen == set(KINDS)


def test_quick_keeps_the_smallest_and_the_largest():
    def sizes(quick):
        return [case.dims for case in cases(quick) if case.kind == "matmul"]

    assert sizes(True)[0] == sizes(False)[0] and sizes(True)[-1] == sizes(False)[-1]
    assert len(sizes(True)) < len(sizes(False))


def test_rates_are_there_and_threads_are_given_back(tmp_path):
    before = torch.get_num_threads()
    rate, _ = bandwidth(0.01, 4_000_000)
    assert 1e8 < rate < 1e13
    assert all_cores(1, 0.01) > 1e8
    assert torch.get_num_threads() == before
    found = precisions(0.05)
    assert found["matmul_float32"]["forward_flops"] > 1e7
    assert set(found) == {f"{k}_{p}" for k in ("matmul", "conv") for p in ("float32", "bfloat16", "float16")}
    written, read = storage(tmp_path, 1_000_000)
    assert written > 0 and read > 0 and not list(tmp_path.iterdir())


def test_where_nothing_can_be_written_there_is_no_figure(tmp_path):
    assert storage(tmp_path / "none", 1000) is None
