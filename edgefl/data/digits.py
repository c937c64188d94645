"""The digits that come with scikit-learn: no download, and a linear model learns them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from edgefl.data.config import DataConfig
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError
from edgefl.keyed import generator

NUM_TRAIN = 1437
"""Of 1,797 examples; the other 360 are for the test."""


def load_digits(config: DataConfig) -> Dataset:
    """x: (n, 1, 8, 8) float32 in [0, 1]; ten classes; 1,437 training and 360 test examples, always the same.

    Source: Optical recognition of handwritten digits (Alpaydin, Kaynak 1998), test part, via scikit-learn.
    """
    # The file itself: importing scikit-learn takes a second, for an array that NumPy reads in 30 ms.
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ConfigError("data.name", "digits", "needs scikit-learn: pip install 'edgefl[data]'")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",")
    pixels, labels = table[:, :-1], table[:, -1]
    order = generator(0, "digits split").permutation(len(labels))
    x = torch.from_numpy((pixels[order] / 16.0).astype(np.float32)).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels[order].astype(np.int64))
    parts = (x[:NUM_TRAIN], y[:NUM_TRAIN], x[NUM_TRAIN:], y[NUM_TRAIN:])
    return Dataset("digits", "classification", *parts, num_classes=10)
