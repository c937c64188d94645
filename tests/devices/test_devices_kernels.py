import pytest
from pydantic import ValidationError

from edgefl.devices.kernels import KINDS, Kernels

ROW = {kind: tuple(8.0 for _ in names) for kind, (names, _) in KINDS.items()}


def made(**times) -> Kernels:
    """Kernels of one row per kind, a microsecond each, but for those given."""
    rows = {kind: (((*dims, 1e-6),)) for kind, dims in ROW.items()}
    return Kernels(step_s=0.0, node_s=0.0, times={**rows, **times})


def test_a_rate_that_does_not_change_is_found_at_other_sizes():
    rows = ((1.0, 2e-6), *((n, 2e-6 + n / 1e10) for n in (1e3, 1e5, 1e7)))
    kernels = made(elementwise=rows)
    for n in (3e3, 1e6, 5e6, 1e9):
        assert kernels.seconds("elementwise", (n,)) == pytest.approx(2e-6 + n / 1e10, rel=0.1)
    assert kernels.seconds("elementwise", (1.0,)) == pytest.approx(2e-6, rel=0.11)


def test_products_between_measured_sizes_take_between_their_times():
    sizes = (16, 64, 256)
    rows = tuple(
        (m, n, k, 1e-6 + 2 * m * n * k / (1e9 * k**0.5)) for m in sizes for n in sizes for k in sizes
    )
    kernels = made(matmul=((1, 1, 1, 1e-6), *rows))
    for m, n, k in ((32, 64, 128), (128, 128, 128), (16, 200, 100)):
        expected = 1e-6 + 2 * m * n * k / (1e9 * k**0.5)
        assert kernels.seconds("matmul", (m, n, k)) == pytest.approx(expected, rel=0.05)


def test_far_from_what_was_measured_the_rate_stays_in_its_range():
    rows = ((1.0, 1e-6), (1e3, 1e-6 + 1e3 / 1e9), (1e5, 1e-6 + 1e5 / 1e10))
    kernels = made(elementwise=rows)
    assert kernels.seconds("elementwise", (1e12,)) >= 1e12 / 1e10 * 0.99


def test_scale_and_context_are_added():
    kernels = made(elementwise=((1.0, 1e-6), (1e6, 1e-4)))
    plain = kernels.seconds("elementwise", (1e6,))
    more = kernels.model_copy(update={"scale": 2.0, "context_s": {"elementwise": 1e-5}})
    assert more.seconds("elementwise", (1e6,)) == pytest.approx(2 * (plain + 1e-5))


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"matmull": ((1, 1, 1, 1e-6),)}, "did you mean 'matmul'"),
        ({"matmul": ((1, 1, 1e-6),)}, "a row is m, n, k, seconds"),
        ({"matmul": ((1, 1, 1, -1e-6),)}, "all positive"),
        ({"pool": ()}, "times.pool: at least one row"),
    ],
)
def test_wrong_tables_are_refused(times, message):
    with pytest.raises(ValidationError, match=message):
        made(**times)
