import json

import pytest
from pydantic import ValidationError

from edgefl.devices import DeviceProfile, catalog, device
from edgefl.errors import ConfigError

GOOD = {"compute_flops": 1e10, "memory_bytes_per_s": 4e9, "memory_bytes": 2_000_000_000}
EXPECTED = {
    "raspberry-pi-zero-2w", "raspberry-pi-3b-plus", "raspberry-pi-4b", "raspberry-pi-5",
    "jetson-nano", "jetson-xavier-nx", "jetson-orin-nano", "jetson-agx-orin",
    "intel-nuc", "laptop-old", "laptop", "phone-arm", "workstation-gpu", "cloud-vm",
}  # fmt: skip


def test_the_catalog_holds_the_known_boards_each_with_title_and_source():
    assert set(catalog()) == EXPECTED
    for name, profile in catalog().items():
        assert profile.name == name and profile.title and len(profile.source) > 40


def test_boards_rank_as_people_know_them():
    ranked = [device(f"raspberry-pi-{model}") for model in ("zero-2w", "3b-plus", "4b", "5")]
    speeds = [board.compute_flops for board in ranked]
    assert speeds == sorted(speeds)
    overheads = [board.step_overhead_s for board in ranked]
    assert overheads == sorted(overheads, reverse=True)
    assert device("workstation-gpu").compute_flops == max(p.compute_flops for p in catalog().values())
    assert 0.002 < device("raspberry-pi-4b").step_overhead_s < 0.02


@pytest.mark.parametrize(
    ("alias", "name"),
    [("raspberry-pi-4", "raspberry-pi-4b"), ("orin-nano", "jetson-orin-nano"), ("laptop", "laptop")],
)
def test_aliases(alias, name):
    assert device(alias).name == name


def test_a_misspelt_name_gets_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean 'raspberry-pi-5'") as caught:
        device("rasberry-pi5")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_users_own_profile(tmp_path, suffix):
    path = tmp_path / f"my-board{suffix}"
    table = {**GOOD, "step_times_s": {"cnn": {"16": 0.02}}}
    toml = "\n".join(f"{k} = {v!r}" for k, v in GOOD.items()) + "\n[step_times_s.cnn]\n16 = 0.02\n"
    path.write_text(json.dumps(table) if suffix == ".json" else toml)
    found = device(path)
    assert found == DeviceProfile(name="my-board", **GOOD, step_times_s={"cnn": {16: 0.02}})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compute_flops": -1}, r"my-board.json\).compute_flops = -1: should be greater than 0"),
        ({"compute_flops": 1e17}, "compute_flops = 1e\\+17"),
        ({"memory_bytes": None}, "memory_bytes = None"),
        ({"idle_w": 5, "busy_w": 2}, "busy_w = 2 should be at least idle_w = 5"),
        ({"busy_w": 1e9}, "busy_w"),
        ({"step_overhead_s": float("nan")}, "step_overhead_s = nan"),
        ({"step_times_s": {"cnn": {"16": 0}}}, "batch size 16"),
        ({"memory_byts": 3}, "did you mean 'memory_bytes'"),
        ({"lanes": 0}, "lanes = 0"),
    ],
)
def test_wrong_figures_are_refused_in_one_line(tmp_path, change, said):
    path = tmp_path / "my-board.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ConfigError, match=said) as caught:
        device(path)
    assert "\n" not in str(caught.value)


def test_a_missing_figure_is_named(tmp_path):
    path = tmp_path / "b.json"
    path.write_text(json.dumps({k: v for k, v in GOOD.items() if k != "compute_flops"}))
    with pytest.raises(ConfigError, match=r"compute_flops = None: Field required"):
        device(path)


@pytest.mark.parametrize(("name", "text"), [("b.json", "{"), ("b.toml", "x ="), ("b.json", "[1]")])
def test_files_that_hold_no_table(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="profile"):
        device(tmp_path / name)
    with pytest.raises(ConfigError, match="readable"):
        device(tmp_path / "none.toml")


def test_profiles_are_frozen():
    with pytest.raises(ValidationError):
        device("laptop").idle_w = 3.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compute_flops = -1e9", r"compute_flops = -1000000000\.0: should be greater than 0"),
        ("compute_flops = 1e30", "compute_flops = 1e\\+30: should be less than or equal to"),
        ('memory_bytes_per_s = "4 GB/s"', "memory_bytes_per_s = '4 GB/s': should be a valid number"),
        ("step_overhead_s = nan", "step_overhead_s = nan: should be a finite number"),
        ("compute_flopps = 1e9", "did you mean 'compute_flops'"),
        (
            "[kernels]\nstep_s = 0.0\nnode_s = 0.0\ntimes = { matmull = [[1, 1, 1, 1e-6]] }",
            "did you mean 'matmul'",
        ),
        ("[kernels]\nstep_s = -1.0\nnode_s = 0.0\ntimes = {}", r"kernels\.step_s = -1\.0"),
        ('[step_times_s]\n"cnn/8234" = { 16 = -0.1 }', "both should be positive"),
    ],
)
def test_wrong_figures_of_a_file_are_refused_in_one_line(tmp_path, line, message):
    figures = {"compute_flops": 1e9, "memory_bytes_per_s": 1e9, "memory_bytes": 10**9}
    name = line.split(" ")[0]
    kept = [f"{key} = {value!r}" for key, value in figures.items() if key != name]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join([*kept, line]) + "\n")
    with pytest.raises(ConfigError, match=message) as refusal:
        device(path)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400 + len(str(path))


FIGURES = (
    "compute_flops", "memory_bytes_per_s", "memory_bytes", "step_overhead_s", "idle_w", "busy_w",
    "radio_j_per_byte",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_each_figure_says_where_it_comes_from(name):
    """A public address, or that it is an estimate; what nobody has read there is not called verified."""
    profile = device(name)
    named = {figure for source in profile.sources for figure in source.figures}
    assert named == {figure for figure in FIGURES if getattr(profile, figure) is not None}
    for source in profile.sources:
        if source.url is None:
            assert source.says.startswith("estimated") and not source.verified
        else:
            assert source.url.startswith(("https://", "http://")) and " " not in source.url
    assert any(source.url for source in profile.sources if "compute_flops" in source.figures)
