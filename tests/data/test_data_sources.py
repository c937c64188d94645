import gzip
import hashlib
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch

from edgefl.data import DataConfig, PartitionConfig, fashion, load_dataset
from edgefl.data.download import cache_folder, download
from edgefl.data.text import ALPHABET, decode
from edgefl.errors import ConfigError


def same(a, b):
    return all(torch.equal(getattr(a, k), getattr(b, k)) for k in ("x_train", "y_train", "x_test", "y_test"))


def test_digits_have_the_agreed_split():
    data = load_dataset(DataConfig())
    assert data.x_train.shape == (1437, 1, 8, 8) and data.x_test.shape == (360, 1, 8, 8)
    assert data.x_train.dtype == torch.float32 and data.y_train.dtype == torch.int64
    assert data.x_train.min() == 0 and data.x_train.max() == 1
    assert set(data.y_test.tolist()) == set(range(10)) and data.input_shape == (1, 8, 8)
    assert same(data, load_dataset(DataConfig()))
    rows = {row.numpy().tobytes() for row in data.x_train} & {row.numpy().tobytes() for row in data.x_test}
    assert not rows


def test_digits_without_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"pip install 'edgefl\[data\]'"):
        load_dataset(DataConfig())


def test_parts_of_a_data_set_are_the_same_in_every_run():
    config = DataConfig(num_train=100, num_test=20)
    data = load_dataset(config)
    assert len(data.x_train) == len(data.y_train) == 100 and len(data.y_test) == 20
    assert same(data, load_dataset(config))
    with pytest.raises(ConfigError, match=r"num_train = 2000: at most the 1437"):
        load_dataset(DataConfig(num_train=2000))


def test_unknown_names_and_foreign_keys():
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        load_dataset(DataConfig(name="digit"))
    with pytest.raises(ConfigError, match=r"data.alpha = 0.5: not for digits"):
        load_dataset(DataConfig(alpha=0.5))
    assert DataConfig.model_validate({"partition": "shards"}).partition == PartitionConfig(name="shards")


def test_a_config_spelt_out_in_full_loads_the_same():
    config = DataConfig(num_train=10)
    assert same(load_dataset(DataConfig(**config.model_dump())), load_dataset(config))


# Fashion-MNIST: made files of the real format


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def fashion_files(folder, train=30, test=10):
    rng = np.random.Generator(np.random.PCG64(0))
    folder.mkdir(exist_ok=True)
    for name, n in (("train", train), ("t10k", test)):
        images, labels = rng.integers(0, 256, (n, 28, 28)), np.arange(n) % 10
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return folder


def test_fashion_from_a_folder(tmp_path):
    data = load_dataset(DataConfig(name="fashion-mnist", folder=fashion_files(tmp_path)))
    assert data.x_train.shape == (30, 1, 28, 28) and data.y_test.tolist() == list(range(10))
    raw = gzip.decompress((tmp_path / "train-images-idx3-ubyte.gz").read_bytes())
    assert data.x_train[0, 0, 0, 0].item() == pytest.approx(raw[16] / 255)


def test_fashion_from_debians_package(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion, "DEBIAN", fashion_files(tmp_path))
    assert len(load_dataset(DataConfig(name="fashion-mnist")).y_train) == 30


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (gzip.compress(b"\0\0\x0d\x01" + b"\0\0\0\x01" + b"x"), "idx file"),
        (gzip.compress(b""), "idx file"),
        (gzip.compress(idx(np.zeros(29))[:-1]), "as its header says; it holds 28"),
        (gzip.compress(idx(np.full(30, 10))), "labels from 0 to 9; found 10"),
        (gzip.compress(idx(np.zeros(29))), "found pictures"),
        (gzip.compress(idx(np.zeros(30)))[:-9], "readable .gz"),
        (b"no gzip", "readable .gz"),
    ],
    ids=["kind", "empty", "short", "labels", "pictures", "cut off", "no gzip"],
)
def test_broken_fashion_files_are_refused(tmp_path, raw, said):
    (fashion_files(tmp_path) / "train-labels-idx1-ubyte.gz").write_bytes(raw)
    with pytest.raises(ConfigError, match=said):
        load_dataset(DataConfig(name="fashion-mnist", folder=tmp_path))


class _Files(BaseHTTPRequestHandler):
    def __init__(self, contents, *args):
        self.contents = contents
        super().__init__(*args)

    def do_GET(self):
        body = self.contents.get(self.path.lstrip("/"))
        self.send_response(200 if body is not None else 404)
        self.send_header("Content-Length", str(len(body or b"") + (100 if self.path == "/short" else 0)))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *args):
        pass


@pytest.fixture
def served():
    contents = {}
    server = HTTPServer(("127.0.0.1", 0), partial(_Files, contents))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield contents, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_fashion_is_downloaded_once_into_the_cache(tmp_path, monkeypatch, served):
    contents, address = served
    for path in fashion_files(tmp_path / "site").iterdir():
        contents[path.name] = path.read_bytes()
    digests = {name: hashlib.md5(contents[name]).hexdigest() for name in fashion.MD5}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "none")
    monkeypatch.setattr(fashion, "ADDRESS", address)
    monkeypatch.setattr(fashion, "MD5", digests)
    first = load_dataset(DataConfig(name="fashion-mnist"))
    contents.clear()  # the second time, nothing is asked for
    assert same(first, load_dataset(DataConfig(name="fashion-mnist")))
    assert sorted(p.name for p in (cache_folder() / "fashion-mnist").iterdir()) == sorted(digests)


@pytest.mark.parametrize(
    ("name", "said"),
    [("gone", "404"), ("other", "what came has"), ("short", "address that answers|what came has")],
)
def test_a_failed_download_says_why_and_leaves_nothing(tmp_path, served, name, said):
    contents, address = served
    contents.update(other=b"not the data", short=b"the da")
    with pytest.raises(ConfigError, match=said) as caught:
        download(address + name, hashlib.md5(b"the data").hexdigest(), tmp_path / "x" / "file", "data.name")
    assert address in str(caught.value) and "\n" not in str(caught.value)
    assert list((tmp_path / "x").iterdir()) == []


def test_a_dead_host_says_why(tmp_path):
    with pytest.raises(ConfigError, match="an address that answers"):
        download("http://127.0.0.1:9/file", "0" * 32, tmp_path / "file", "data.name")
    assert list(tmp_path.iterdir()) == []


# Generated data


def test_synthetic_is_keyed_and_owned():
    config = DataConfig(name="synthetic", num_owners=12)
    data = load_dataset(config)
    assert data.x_train.shape[1:] == (60,) and data.x_train.dtype == torch.float32
    assert np.unique(data.owners).tolist() == list(range(12)) and len(data.owners) == len(data.y_train)
    assert same(data, load_dataset(config))
    assert not torch.equal(
        data.x_train[:5], load_dataset(config.model_copy(update={"data_seed": 1})).x_train[:5]
    )
    sizes = np.bincount(data.owners)
    assert sizes.min() >= 45 and sizes.max() <= 1800 and sizes.max() > 2 * sizes.min()


def test_beta_controls_how_unlike_inputs_are():
    def spread(beta):
        data = load_dataset(DataConfig(name="synthetic", beta=beta, num_owners=20, examples_per_owner=100))
        return np.std([data.x_train[data.owners == k].mean().item() for k in range(20)])

    assert spread(25.0) > 3.0 > 0.5 > spread(0.0)


def fitted_accuracy(**options):
    """Training accuracy of one linear model over all owners, after a full-batch fit."""
    config = DataConfig(name="synthetic", examples_per_owner=100, num_classes=3, num_features=10, **options)
    data = load_dataset(config)
    x = torch.cat([data.x_train, torch.ones(len(data.x_train), 1)], dim=1)
    W = torch.zeros(11, 3, requires_grad=True)
    optimizer = torch.optim.LBFGS([W], max_iter=60, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(x @ W, data.y_train)
        value.backward()
        return value

    optimizer.step(loss)
    return ((x @ W).argmax(1) == data.y_train).float().mean().item()


def test_one_linear_model_fits_owners_that_share_theirs_and_no_others():
    assert fitted_accuracy(num_owners=1) > 0.97
    assert fitted_accuracy(num_owners=30, model_spread=0.0) > 0.97
    assert fitted_accuracy(num_owners=30) < 0.8
    assert fitted_accuracy(num_owners=30, model_spread=4.0) < 0.8


def test_text_shifts_by_one_character_and_stays_in_the_alphabet():
    config = DataConfig(name="text", num_owners=5)
    data = load_dataset(config)
    assert data.task == "language" and data.num_classes == len(ALPHABET) == 30
    assert data.x_train.shape == data.y_train.shape and data.input_shape == (32,)
    assert torch.equal(data.x_train[:, 1:], data.y_train[:, :-1])
    assert torch.equal(data.y_train[0, -1], data.x_train[1, 0])  # one speaker's pieces join
    assert data.x_train.min() >= 0 and data.x_train.max() < 30
    assert same(data, load_dataset(config)) and len(np.unique(data.owners)) == 5


def test_text_reads_like_sentences():
    data = load_dataset(DataConfig(name="text", num_owners=1, examples_per_owner=100))
    lines = decode(data.x_train.flatten().numpy()).split("\n")[:-1]
    assert len(lines) > 20 and all(line.endswith(".") and len(line.split()) >= 4 for line in lines)


def test_speakers_differ():
    data = load_dataset(DataConfig(name="text", num_owners=8, examples_per_owner=120))
    counts = np.stack(
        [np.bincount(data.x_train[data.owners == k].flatten().numpy(), minlength=30) for k in range(8)]
    )
    shares = counts / counts.sum(axis=1, keepdims=True)
    between = np.abs(shares - shares.mean(axis=0)).sum(axis=1).mean()
    halves = [
        np.bincount(data.x_train[data.owners == 0][h::2].flatten().numpy(), minlength=30) for h in (0, 1)
    ]
    within = np.abs(halves[0] / halves[0].sum() - halves[1] / halves[1].sum()).sum()
    assert between > 2 * within


# A user's own arrays


def arrays(**changes):
    made = {"x_train": np.ones((6, 3)), "y_train": np.arange(6) % 3}
    made |= {"x_test": np.ones((2, 3)), "y_test": np.arange(2)}
    return {k: v for k, v in {**made, **changes}.items() if v is not None}


def save(folder, **changes):
    np.savez(folder / "mine.npz", **arrays(**changes))
    return DataConfig(name="folder", folder=folder)


def test_folder_classification(tmp_path):
    data = load_dataset(save(tmp_path, owners=np.array(["b", "a", "b", "a", "c", "c"])))
    assert (data.name, data.task, data.num_classes) == ("mine", "classification", 3)
    assert data.x_train.dtype == torch.float32 and data.y_train.dtype == torch.int64
    assert data.owners.tolist() == [1, 0, 1, 0, 2, 2]
    assert same(data, load_dataset(DataConfig(name="folder", folder=tmp_path / "mine.npz")))


def test_folder_regression_and_language(tmp_path):
    data = load_dataset(save(tmp_path, y_train=np.zeros(6), y_test=np.zeros(2)))
    assert data.task == "regression" and data.y_train.shape == (6, 1) and data.num_classes == 1
    tokens = {
        name: np.full((n, 3), 4) for name, n in (("x_train", 6), ("y_train", 6), ("x_test", 2), ("y_test", 2))
    }
    data = load_dataset(save(tmp_path, **tokens))
    assert data.task == "language" and data.num_classes == 5 and data.x_train.dtype == torch.int64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"y_test": None}, "y_test: an array of this name; found x_train, y_train, x_test"),
        ({"x_train": np.ones((5, 3))}, "x_train: as many inputs as targets, at least one; found 5 inputs"),
        (
            {"x_test": np.ones((0, 3)), "y_test": np.arange(0)},
            "x_test: as many inputs as targets, at least one",
        ),
        ({"x_test": np.ones((2, 4))}, r"x_test: examples of \(3,\) float64 as in training; found \(4,\)"),
        ({"y_test": np.zeros(2)}, "y_test: examples of .* int64 as in training; found .* float64"),
        ({"x_train": np.array([[1.0] * 3] * 4 + [[np.nan] * 3] * 2)}, "x_train: finite numbers; row 4"),
        ({"y_train": np.arange(6) - 1}, "y_train: labels from 0 up; found -1"),
        ({"y_test": np.array([0, 3])}, "y_test: labels from 0 to 2 as in training; found 3"),
        ({"y_train": np.array(list("abcdef"))}, "y_train: an array of numbers"),
        ({"y_train": np.zeros((6, 2), int), "y_test": np.zeros((2, 2), int)}, "y_train: .* integers"),
        ({"owners": np.arange(5)}, "owners: one integer or string per training example"),
        ({"x_train": np.array(3.0)}, "x_train: an array"),
        ({"x_train": np.array([{}] * 6)}, "plain arrays, without Python objects"),
    ],
)
def test_wrong_arrays_are_refused_by_name(tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said) as caught:
        load_dataset(save(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_wrong_folders(tmp_path):
    for folder, said in (
        (None, "an .npz file"),
        (tmp_path, "it has 0"),
        (tmp_path / "no.npz", "that is there"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_dataset(DataConfig(name="folder", folder=folder))
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    with pytest.raises(ConfigError, match="several named arrays"):
        load_dataset(DataConfig(name="folder", folder=tmp_path))
    (tmp_path / "one.npz").write_bytes(b"PK\x03\x04broken")
    with pytest.raises(ConfigError, match="readable"):
        load_dataset(DataConfig(name="folder", folder=tmp_path))
    (tmp_path / "one.npz").write_bytes(b"text")
    with pytest.raises(ConfigError, match="plain arrays"):
        load_dataset(DataConfig(name="folder", folder=tmp_path))
