"""The experiment file: what is accepted, what is refused and how, and that the resolved file says it all."""

from __future__ import annotations

import json
import os
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from experiment_files import small_file

from edgefl.errors import ConfigError
from edgefl.experiment import toml
from edgefl.experiment.build import build
from edgefl.experiment.config import load_experiment

REFUSED = [
    # override, key of the refusal, a part of what it says would be accepted
    ("sed=1", "sed", "did you mean 'seed'?"),
    ("train.learning_rat=0.1", "train.learning_rat", "did you mean 'learning_rate'?"),
    ("train.learning_rate=-1", "train.learning_rate", "greater than 0"),
    ("train.learning_rate='1'", "train.learning_rate", "valid number"),
    ("train.batch_size=true", "train.batch_size", "valid integer"),
    ("train=3", "train", "table"),
    ("seed=-1", "seed", "greater than or equal to 0"),
    ("method.name=fedagv", "method.name", "did you mean 'fedavg'?"),
    ("method.fedavg.client_fractoin=1.0", "method.fedavg.client_fractoin", "'client_fraction'"),
    ("method.fedavg.client_fraction=0", "method.fedavg.client_fraction", "greater than 0"),
    ("method.client_fraction=0.5", "method.client_fraction", "[method.fedavg]"),
    ("method.fedasyn.staleness=constant", "method.fedasyn", "did you mean 'fedasync'?"),
    ("fleet.devices={laptopp=1}", "fleet.devices", "did you mean 'laptop'?"),
    ("fleet.devices.laptop=0", "fleet.devices.laptop", "greater than or equal to 1"),
    ("fleet.devices.laptop=-3", "fleet.devices.laptop", "greater than or equal to 1"),
    ("fleet.devices={}", "fleet.devices", "at least 1"),
    ("fleet.roles.server=lptop", "fleet.roles.server", "did you mean 'laptop'?"),
    ("fleet.roles.clients=laptop", "fleet.roles.clients", "no such key; known: "),
    ("fleet.stragglers={share=1.5, slowdown=2}", "fleet.stragglers.share", "(0, 1]"),
    ("fleet.stragglers={1=0.5}", "fleet.stragglers.1", "at least 1"),
    ("fleet.stragglers={9=2}", "fleet.stragglers.9", "nodes 0 to 4"),
    ("network.stragglers={share=0, slowdown=2}", "network.stragglers.share", "greater than 0"),
    ("network.stragglers={share=0.5, slowdown=0.5}", "network.stragglers.slowdown", "at least 1"),
    ("network.stragglers={9=2}", "network.stragglers.9", "nodes 0 to 4"),
    ("network.topology=rng", "network.topology.name", "did you mean 'ring'?"),
    ("network.mixing=metropoli", "network.mixing", "did you mean 'metropolis'?"),
    ("network.link=hom", "network.link", "did you mean 'home'?"),
    ("network.link={laptp='home'}", "network.link.laptp", "did you mean 'laptop'?"),
    ("network.link={up='2 Mbit'}", "network.link.up", "a number and a unit"),
    ("network.link={like='home', segment='ap'}", "network.segments", "a rate for each segment"),
    ("network.link_model=fare", "network.link_model", "'fair'"),
    ("network.caps=[{sender=0, receiver=9, rate=1000}]", "network.caps", "nodes 0 to 4"),
    ("network.path='2 Mbits'", "network.path", "a number and a unit"),
    ("data.name=digit", "data.name", "did you mean 'digits'?"),
    ("data.partition={name='shards', shards_per_node=11}", "data.partition.shards_per_node", "labels (10)"),
    ("data.partition.alpha=0", "data.partition.alpha", "greater than 0"),
    ("model.name=mpl", "model.name", "did you mean 'mlp'?"),
    ("model.hiden=[3]", "model.hiden", "did you mean 'hidden'?"),
    ("stop.target={metric='accuracy', value=1.2}", "stop.target.value", "(0, 1]"),
    ("stop.target.value=90", "stop.target.value", "(0, 1]"),
    ("stop.target={metric='perplexity', value=2}", "stop.target.metric", "accuracy or loss"),
    ("stop={}", "stop", "at least one of rounds"),
    ("stop.rounds=0", "stop.rounds", "greater than or equal to 1"),
    ("stop.time_s=inf", "stop.time_s", "finite"),
    ("evaluate.every_s=0", "evaluate.every_s", "greater than 0"),
    ("faults.crashes=[{nod=1, at_s=1}]", "faults.crashes.0.node", "needed"),
    ("faults.crashes=[{node=5, at_s=1}]", "faults.crashes.0.node", "nodes 0 to 4"),
    ("faults.partitions=[{nodes=[7], at_s=1, for_s=1}]", "faults.partitions.0.nodes", "nodes 0 to 4"),
    ("faults.churn={mean_up_s=10, mean_down_s=1}", "faults.churn.until_s", "stop.time_s"),
    ("faults.poison={share=1.5}", "faults.poison.share", "less than or equal to 1"),
    ("faults.poison={share=0.5, kind='sign-flop'}", "faults.poison.kind", "'sign-flip'"),
    ("compress.name=topk", "compress.name", "'top-k'"),
    ("compress={name='qsgd', bucket=12}", "compress.bucket", "multiple of 8"),
    ("execution.executor=bached", "execution.executor", "'batched'"),
    ("seed", "--set", "KEY=VALUE"),
    (f"seed={'9' * 5000}", "--set", "KEY=VALUE"),
    (f"{'a.' * 3000}b=1", "--set", "50 deep"),
    (f"data.folder={'[' * 3000}", "--set", "KEY=VALUE"),
    ("name=\udcff", "--set", "KEY=VALUE"),
    (f"name={'n' * 101}", "name", "at most 100"),
    (f"train.local_steps={2**63}", "train.local_steps", "64 bits"),
    (f"stop.rounds={10**400}", "stop.rounds", "64 bits"),
    ("train.learning_rate=inf", "train.learning_rate", "finite"),
    ("train.betas=[nan, 0.9]", "train.betas.0", "finite"),
    ("method.fedavg.max_update_norm=inf", "method.fedavg.max_update_norm", "finite"),
    ("network.link={jetson-nano=5}", "network.link.jetson-nano", "a link class"),
    ('faults.availability.file="a\\u0000"', "faults.availability.file", "can be read"),
    ("seed.x=1", "--set", "not a table"),
]  # fmt: skip
D_PSGD_FOR = ("network.topology", "network.mixing")


@pytest.mark.parametrize(("override", "key", "accepted"), REFUSED, ids=[ascii(r[0][:40]) for r in REFUSED])
def test_a_mistake_is_refused_in_one_line(tmp_path: Path, override: str, key: str, accepted: str) -> None:
    method = "d-psgd" if key.startswith(D_PSGD_FOR) else None
    with pytest.raises(ConfigError) as caught:
        build(load_experiment(small_file(tmp_path), [override], method=method))
    assert caught.value.key == key
    assert accepted in caught.value.accepted
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_experiment(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = 1\nstop = = 3\n")
    with pytest.raises(ConfigError, match="line 2"):
        load_experiment(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_experiment(broken)
    for nested in (f"x = {'[' * 5000}{']' * 5000}", f"{'a.' * 3000}b = 1"):
        broken.write_text(nested)
        with pytest.raises(ConfigError, match="50 deep"):
            load_experiment(broken)
    broken.write_text(f"seed = {'9' * 5000}")
    with pytest.raises(ConfigError, match="digits"):
        load_experiment(broken)
    with pytest.raises(ConfigError, match="null byte"):
        load_experiment(tmp_path / "a\0.toml")
    with pytest.raises(ConfigError, match="at most 16 MB"):
        load_experiment("/dev/zero")


def test_what_is_found_is_shown_in_a_line_that_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment(small_file(tmp_path), [f"fleet.roles.server={'x' * 100_000}"])
    assert len(str(caught.value)) < 1500
    assert caught.value.found == "x" * 100_000


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = small_file(tmp_path)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert load_experiment(file) == load_experiment(small_file(tmp_path))


def test_a_method_that_needs_two_sides_is_refused_on_an_odd_ring(tmp_path: Path) -> None:
    path = small_file(tmp_path, more='\n[network]\ntopology = "ring"\n')
    odd = ["fleet.devices={laptop=5}"]
    with pytest.raises(ConfigError, match=r"network.topology = 'ring': ad-psgd needs a bipartite graph"):
        build(load_experiment(path, odd, method="ad-psgd"))
    assert build(load_experiment(path, odd, method="d-psgd")).plan.network.topology.name == "ring"
    assert build(load_experiment(path, odd, method="fedavg")).plan.network.topology.name == "star"


def test_a_graph_in_pieces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pieces.txt").write_text("0 1\n2 3\n")
    path = small_file(tmp_path, more='\n[network]\ntopology = "pieces.txt"\n')
    with pytest.raises(ConfigError, match="a connected graph; node 0 reaches 2 of 4"):
        build(load_experiment(path, method="d-psgd"))


def test_the_smoke_overlay(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    plain, quick = load_experiment(path), load_experiment(path, smoke=True)
    assert (plain.stop.rounds, quick.stop.rounds) == (4, 1)
    assert quick.fleet.devices == {"laptop": 2}  # names of devices are replaced, not merged
    assert quick.train == plain.train
    wrong = small_file(tmp_path, replace=("[smoke.stop]\nrounds", "[smoke.stop]\nround"))
    with pytest.raises(ConfigError, match=r"smoke.stop.round = 1: no such key; did you mean 'rounds'"):
        load_experiment(wrong)


def test_overrides(tmp_path: Path) -> None:
    overrides = [
        "train.learning_rate=0.5",
        "data.partition=iid",
        'fleet.devices."raspberry-pi-4b"=7',
        "stop={time_s=2}",
        "method.fedavg.weighting=uniform",
    ]
    experiment = load_experiment(small_file(tmp_path), overrides, seed=9, method="fedavg")
    assert experiment.train.learning_rate == 0.5
    assert experiment.data.partition.name == "iid"
    assert experiment.fleet.devices == {"raspberry-pi-4b": 7, "jetson-nano": 1, "laptop": 1}
    assert (experiment.stop.rounds, experiment.stop.time_s) == (None, 2)
    assert experiment.method.config.model_dump()["weighting"] == "uniform"
    assert experiment.seed == 9
    assert experiment.name == "small"


def test_the_resolved_file_says_the_same_and_the_decisions(tmp_path: Path) -> None:
    more = """
[network]
link = { default = "home", server = "ethernet", laptop = { up = "1 Mbit/s", down = "8 Mbit/s" } }
segments = { "the ap" = "20 Mbit/s" }
[faults]
crashes = [{ node = 1, at_s = 2.5, down_s = 1 }]
"""
    experiment = load_experiment(small_file(tmp_path, more=more))
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(experiment.to_toml())
    again = load_experiment(resolved)
    assert again.to_toml() == experiment.to_toml()
    assert again.decided().model_dump(exclude={"method"}) == experiment.decided().model_dump(
        exclude={"method"}
    )
    assert again.method.config == experiment.method.config
    assert (again.execution.executor, again.execution.group, again.network.link_model) == (
        "batched",
        32,
        "fair",
    )
    assert build(again).plan.network.access[4].up_bytes_per_s == 125_000
    assert build(again).plan.network.access[0].name == "ethernet"


def test_groups_go_by_the_clients_of_a_round(tmp_path: Path) -> None:
    more = ["fleet.devices.raspberry-pi-4b=398", "method.fedavg.client_fraction=0.25"]
    execution = load_experiment(small_file(tmp_path), more).decided().execution
    assert (execution.executor, execution.group) == ("batched", 50)
    given = load_experiment(small_file(tmp_path), [*more, "execution.group=40"]).decided().execution
    assert given.group == 40


def test_files_beside_the_experiment_are_found(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(
        "compute_flops = 1e9\nmemory_bytes_per_s = 1e9\nmemory_bytes = 1000000\nidle_w = 1\nbusy_w = 2\n"
    )
    path = small_file(tmp_path, replace=("laptop = 1", '"slow.toml" = 1'))
    plan = build(load_experiment(path)).plan
    assert plan.nodes[4].profile.name == "slow"


def test_the_same_device_is_the_same_in_every_method(tmp_path: Path) -> None:
    """Data, stragglers and churn go by device, wherever a server shifts the ids."""
    overrides = [
        "fleet.stragglers={share=0.5, slowdown=3}",
        "faults.churn={mean_up_s=5, mean_down_s=1}",
        "stop={time_s=30}",
    ]
    star = build(load_experiment(small_file(tmp_path), overrides, method="fedavg"))
    ring = build(load_experiment(small_file(tmp_path), overrides, method="d-psgd"))
    assert [n.slowdown for n in star.plan.nodes[1:]] == [n.slowdown for n in ring.plan.nodes]
    assert sorted(n.slowdown for n in ring.plan.nodes) == [1, 1, 3, 3]
    assert [list(p.indices) for p in star.parts] == [list(p.indices) for p in ring.parts]
    crashes = [(c.node - 1, c.at_s, c.down_s) for c in star.plan.faults.crashes]
    assert crashes == [(c.node, c.at_s, c.down_s) for c in ring.plan.faults.crashes]
    assert crashes and all(at_s < 30 for _, at_s, _ in crashes)


def test_thin_uplinks_go_by_device_and_leave_the_rest_of_the_link(tmp_path):
    """The same devices as with stragglers that compute; a node beside the devices keeps its own link."""
    overrides = [
        "fleet.stragglers={share=0.5, slowdown=3}",
        "network.stragglers={share=0.5, slowdown=8}",
        "network.link={default='home', server='wifi-5'}",
    ]
    for method in ("fedavg", "d-psgd"):
        plan = build(load_experiment(small_file(tmp_path), overrides, method=method)).plan
        slow = [i for i, spec in enumerate(plan.nodes) if spec.slowdown == 3]
        home = min(plan.network.access, key=lambda a: a.up_bytes_per_s).up_bytes_per_s * 8
        thin = [i for i, a in enumerate(plan.network.access) if a.up_bytes_per_s == home / 8]
        assert slow == thin and len(thin) == 2
        assert len({a.down_bytes_per_s for i, a in enumerate(plan.network.access) if i in thin}) == 1
    explicit = build(load_experiment(small_file(tmp_path), ["network.stragglers={2=4}"])).plan.network.access
    assert explicit[2].up_bytes_per_s == explicit[1].up_bytes_per_s / 4
    assert explicit[2].down_bytes_per_s == explicit[1].down_bytes_per_s


def test_epochs_on_the_command_line_take_the_place_of_the_files_steps(tmp_path):
    path = small_file(tmp_path)
    assert load_experiment(path).train.local_steps == 3
    train = load_experiment(path, ["train.local_epochs=2"]).train
    assert (train.local_steps, train.local_epochs) == (None, 2)
    path.write_text(path.read_text().replace("local_steps = 3", "local_steps = 3\nlocal_epochs = 1"))
    with pytest.raises(ConfigError, match="give local_steps or local_epochs, not both"):
        load_experiment(path)


def test_a_pipe_is_read_when_somebody_writes_and_refused_when_nobody_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    text = small_file(tmp_path).read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=(text,))
    writer.start()
    assert load_experiment(pipe).seed == 3
    writer.join()
    monkeypatch.setattr(toml, "_MOMENT_S", 0.05)
    with pytest.raises(ConfigError, match="into which nobody writes"):
        load_experiment(pipe)


def test_the_tables_may_come_as_a_dictionary(tmp_path: Path) -> None:
    tables = tomllib.loads(small_file(tmp_path).read_text())
    kept = json.dumps(tables)
    found = load_experiment(tables, ["train.local_steps=7"], seed=9)
    assert (found.name, found.seed, found.train.local_steps) == ("experiment", 9, 7)
    assert json.dumps(tables) == kept, "what was given is as it was"
    same = load_experiment(small_file(tmp_path))
    assert load_experiment({**tables, "name": "small"}).to_toml() == same.to_toml()


LOOP: dict[str, Any] = {}
LOOP["stop"] = LOOP


@pytest.mark.parametrize(
    ("change", "key", "said"),
    [
        ({"stop": 3}, "stop", "table"),
        ({"stop": {"rounds": "3"}}, "stop.rounds", "integer"),
        ({"stop": {"rounds": object()}}, "stop.rounds", "integer"),
        ({"stop": {3: 4}}, "stop", "keys that are text"),
        ({"train": {"learning_rate": {1.5: 2}}}, "train.learning_rate", "keys that are text"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate", "finite"),
        ({"fleet": None}, "fleet", "table"),
        ({"fleet": {"devices": ["laptop"]}}, "fleet.devices", "table"),
        ({"method": ["fedavg"]}, "method", "table"),
        (LOOP, "experiment", "50 deep"),
    ],
)
def test_a_dictionary_with_wrong_types_is_refused_in_one_line(
    tmp_path: Path, change: dict[Any, Any], key: str, said: str
) -> None:
    tables = tomllib.loads(small_file(tmp_path).read_text())
    with pytest.raises(ConfigError, match=said) as caught:
        load_experiment({**tables, **change})
    assert caught.value.key == key and "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [None, 42, b"x.toml", ["x.toml"]])
def test_what_is_neither_a_path_nor_a_dictionary_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="tables as a dictionary"):
        load_experiment(source)
