import pytest
import torch

from edgefl.devices import DeviceProfile
from edgefl.devices.kernels import KINDS, Kernels
from edgefl.learning import Learner, ModelConfig, Problem, TrainConfig, Workload, build_model, duration_s
from edgefl.learning.measuring import made_data
from edgefl.learning.operators import StepTimes
from edgefl.learning.work import LocalSGD
from edgefl.learning.work_costs import stage_backward_cost, stage_forward_cost

DIGITS = Problem("classification", (1, 8, 8), 10)
ALL = (
    ("linear", DIGITS), ("mlp", DIGITS), ("cnn", DIGITS), ("resnet", DIGITS), ("vgg", DIGITS),
    ("char-lstm", Problem("language", (12,), 30)), ("transformer", Problem("language", (12,), 30)),
    ("mlp", Problem("regression", (5,), 2)),
)  # fmt: skip


def kernels(seconds: float = 1e-6, **own: float) -> Kernels:
    """Every call takes the same time, whatever its size (one row: all of it is overhead, but for a tenth)."""
    times = {k: ((*(1e9 for _ in names), own.get(k, seconds)),) for k, (names, _) in KINDS.items()}
    return Kernels(step_s=0.0, node_s=0.0, times=times)


def model(name, problem, **options):
    return build_model(ModelConfig(name=name, **options), problem, 0)


@pytest.mark.parametrize(("name", "problem"), ALL)
def test_every_model_is_traced_and_takes_longer_with_larger_batches(name, problem):
    made = model(name, problem, **({"pooled": (2, 4)} if name == "vgg" else {}))
    times = Kernels(
        step_s=1e-5,
        node_s=1e-6,
        times={
            k: ((*(1.0 for _ in n), 1e-6), *([(*(64.0 for _ in n), 1e-4)] if n else []))
            for k, (n, _) in KINDS.items()
        },
    )
    seconds = [made.step_times.seconds(times, b, "step") for b in (1, 8, 64)]
    assert 0 < seconds[0] < seconds[1] < seconds[2]


def test_a_dense_network_calls_what_it_is_made_of():
    first, last, loss = model("mlp", DIGITS, hidden=(16,)).block_passes
    assert [op.kind for op in first.forward].count("matmul") == 1
    assert [op.kind for op in last.backward].count("matmul") == 2  # weights and input
    assert [op.kind for op in first.first_backward].count("matmul") == 1  # weights alone
    product = next(op for op in first.forward if op.kind == "matmul")
    assert product.base == (0, 16, 64) and product.slope == (1, 0, 0)
    assert any(op.kind == "softmax" for op in loss.forward)


def test_convolutions_count_pixels_and_strides():
    stem, same, halved, *_ = model("resnet", DIGITS).block_passes
    conv = next(op for op in stem.forward if op.kind == "conv")
    assert (conv.base, conv.slope) == ((1, 16, 3, 0, 1), (0, 0, 0, 64, 0))
    assert [op.base[-1] for op in same.forward if op.kind == "conv"] == [1, 1]
    assert [op.base[-1] for op in halved.forward if op.kind == "conv"] == [2, 1, 2]
    kinds = [op.kind for op in stem.first_backward]
    assert "conv_weight" in kinds and "conv_input" not in kinds


def test_stages_add_up_to_the_whole():
    made = model("cnn", DIGITS)
    times = kernels()
    whole = made.step_times.seconds(times, 8, "stage")
    parts = [made.stage(0, 2), made.stage(2, 4)]
    together = sum(p.step_times.seconds(times, 8, "stage", p.first > 0) for p in parts)
    # The second stage has passes over its flat vectors of its own.
    assert together == pytest.approx(whole, rel=0.1)
    assert parts[0].block_passes + parts[1].block_passes == made.block_passes


def test_forward_and_backward_are_the_two_halves():
    stage, times = model("cnn", DIGITS).stage(1, 3), kernels()
    profile = DeviceProfile(
        name="x", compute_flops=1, memory_bytes_per_s=1, memory_bytes=10**9, kernels=times
    )
    both = duration_s(stage_backward_cost(stage, 8, True, kept=False), profile)
    forward = duration_s(stage_forward_cost(stage, 8), profile)
    backward = duration_s(stage_backward_cost(stage, 8, True, kept=True), profile)
    assert forward + backward == pytest.approx(both, rel=0.05)


def test_a_profile_without_kernels_goes_by_its_roofline_and_measured_times_beat_both():
    made = model("mlp", DIGITS)
    learner, data = Learner(made, TrainConfig()), made_data(DIGITS, 100)
    cost = LocalSGD(made.init(), data, 0, Workload(batch_size=16, steps=10)).cost(learner)
    plain = {"name": "x", "compute_flops": 1e9, "memory_bytes_per_s": 1e9, "memory_bytes": 10**9}
    roofline = duration_s(cost, DeviceProfile(**plain))
    assert roofline == pytest.approx(max(cost.flops, cost.traffic_bytes) / 1e9)
    by_kernels = duration_s(cost, DeviceProfile(**plain, kernels=kernels()))
    assert by_kernels == pytest.approx(cost.calls.seconds(kernels()))
    times = {made.label: {16: 0.25}}
    assert duration_s(cost, DeviceProfile(**plain, kernels=kernels(), step_times_s=times)) == 2.5


@pytest.mark.parametrize(
    ("steps", "batches"), [(3, ((16, 3),)), (7, ((16, 6), (4, 1))), (15, ((16, 13), (4, 2)))]
)
def test_smaller_last_batches_of_epochs_count_as_what_they_are(steps, batches):
    made = model("linear", DIGITS)
    work = LocalSGD(made.init(), made_data(DIGITS, 100), 0, Workload(batch_size=16, steps=steps))
    cost = work.cost(Learner(made, TrainConfig()))
    assert cost.calls.batches == batches
    examples = sum(len(work.data.batch(s, 16)) for s in work.steps)
    assert sum(size * count for size, count in batches) == examples


def test_asking_again_costs_nothing(monkeypatch):
    made, times = model("cnn", DIGITS), kernels()
    asked = []
    original = StepTimes._seconds
    monkeypatch.setattr(StepTimes, "_seconds", lambda self, *a: asked.append(a) or original(self, *a))
    first = made.step_times.seconds(times, 8, "step")
    assert made.step_times.seconds(times, 8, "step") == first and len(asked) == 1
    made.step_times.seconds(kernels(2e-6), 8, "step")
    assert len(asked) == 2


def test_tracing_leaves_the_random_state_as_it_was():
    before = torch.random.get_rng_state()
    assert model("resnet", DIGITS).block_passes
    assert torch.equal(before, torch.random.get_rng_state())
