"""Fashion-MNIST: 28 x 28 pictures of clothes, ten classes (Xiao et al. 2017, arXiv:1708.07747)."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from edgefl.data.config import DataConfig
from edgefl.data.dataset import Dataset
from edgefl.data.download import cache_folder, download
from edgefl.errors import ConfigError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts the files."""
ADDRESS = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
"""As the authors publish them; Debian's files hold the same pictures, compressed without names."""


def load_fashion(config: DataConfig) -> Dataset:
    """x: (n, 1, 28, 28) float32 in [0, 1]; 60,000 training and 10,000 test examples in the authors' files.

    From data.folder; else from Debian's package; else downloaded once. Raises ConfigError when none works.
    """
    folder = config.folder or (DEBIAN if DEBIAN.is_dir() else None)
    paths = [folder / name if folder else _cached(name) for name in MD5]
    x_train, y_train, x_test, y_test = (read_idx(path) for path in paths)
    train = _pair(x_train, y_train, paths[1])
    test = _pair(x_test, y_test, paths[3])
    return Dataset("fashion-mnist", "classification", *train, *test, num_classes=10)


def _cached(name: str) -> Path:
    return download(ADDRESS + name, MD5[name], cache_folder() / "fashion-mnist" / name, "data.name")


def read_idx(path: Path) -> np.ndarray:
    """The unsigned bytes in a compressed idx file, in its shape.

    Format: two zero bytes, 8 for unsigned bytes, the number of dimensions; each dimension as a big-endian
    32-bit integer; the values (yann.lecun.com/exdb/mnist). Raises ConfigError for any other file.
    """
    try:
        with gzip.open(path, "rb") as file:
            raw = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError("data.folder", str(path), f"a readable .gz file ({error})") from error
    num_dims = raw[3] if raw[:3] == b"\0\0\x08" and len(raw) > 3 else 0
    header = 4 + 4 * num_dims
    if not num_dims or len(raw) < header:
        raise ConfigError("data.folder", str(path), "an idx file of unsigned bytes")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">i4", num_dims, offset=4))
    values = np.frombuffer(raw, np.uint8, offset=header)
    if min(shape) < 0 or values.size != int(np.prod(shape)):
        raise ConfigError(
            "data.folder", str(path), f"{shape} values as its header says; it holds {values.size}"
        )
    return values.reshape(shape)


def _pair(pixels: np.ndarray, labels: np.ndarray, path: Path) -> tuple[Tensor, Tensor]:
    if pixels.shape[1:] != (28, 28) or labels.shape != pixels.shape[:1] or not len(labels):
        found = f"pictures {pixels.shape} and labels {labels.shape}"
        raise ConfigError(
            "data.folder", str(path.parent), f"(n, 28, 28) pictures and (n,) labels; found {found}"
        )
    if labels.max() > 9:
        raise ConfigError("data.folder", str(path), f"labels from 0 to 9; found {labels.max()}")
    x = torch.from_numpy(pixels.astype(np.float32) / np.float32(255)).unsqueeze(1)
    return x, torch.from_numpy(labels.astype(np.int64))
