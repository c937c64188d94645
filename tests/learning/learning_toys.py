"""Small data sets and models that the tests of this folder share."""

from __future__ import annotations

import numpy as np
import torch

from edgefl.data import Dataset, LocalData
from edgefl.learning import Model, ModelConfig, build_model
from edgefl.parameters import Vector


def dataset(task: str, input_shape: tuple[int, ...], outputs: int, n: int = 40) -> Dataset:
    """Random examples; the same at each call."""
    rng = torch.Generator().manual_seed(1)
    if task == "language":
        x = torch.randint(0, outputs, (n, *input_shape), generator=rng)
        y = torch.randint(0, outputs, (n, *input_shape), generator=rng)
    else:
        x = torch.randn(n, *input_shape, generator=rng)
        y = torch.randint(0, outputs, (n,), generator=rng)
        if task == "regression":
            y = torch.randn(n, outputs, generator=rng)
    return Dataset("toy", task, x, y, x[:17], y[:17], outputs)  # type: ignore[arg-type]


def local(data: Dataset, size: int, node: int = 0) -> LocalData:
    """`size` examples of the data set, from place `node` on."""
    return LocalData(data, np.arange(node, node + size) % len(data.x_train), node, seed=3)


def mlp(data: Dataset, *hidden: int, seed: int = 0) -> Model:
    return build_model(ModelConfig(name="mlp", hidden=hidden or (6,)), data, seed)


def near(a: Vector, b: Vector, tolerance: float = 1e-5) -> bool:
    """Equal up to rounding, buffers included."""
    pairs = [(a.values, b.values), *zip(a.buffers, b.buffers, strict=True)]
    return all(torch.allclose(x.double(), y.double(), rtol=tolerance, atol=tolerance) for x, y in pairs)


IMAGE = ("classification", (1, 8, 8), 4)
TEXT = ("language", (7,), 5)
ALL_MODELS = {
    "linear": ({"name": "linear"}, IMAGE),
    "mlp": ({"name": "mlp", "hidden": (6, 5)}, IMAGE),
    "mlp-regression": ({"name": "mlp", "hidden": (6,)}, ("regression", (3,), 2)),
    "cnn": ({"name": "cnn", "channels": (3, 4), "hidden": 6}, IMAGE),
    "cnn-28": ({"name": "cnn", "channels": (2, 2), "hidden": 6}, ("classification", (1, 28, 28), 4)),
    "resnet-group": ({"name": "resnet", "channels": (4, 6), "norm": "group"}, IMAGE),
    "resnet-none": ({"name": "resnet", "channels": (4, 6), "norm": "none"}, IMAGE),
    "resnet-batch": ({"name": "resnet", "channels": (4, 6), "norm": "batch"}, IMAGE),
    "vgg": ({"name": "vgg", "channels": (3, 4), "pooled": (2,), "hidden": 6}, IMAGE),
    "char-lstm": ({"name": "char-lstm", "hidden": 6, "embedding": 3}, TEXT),
    "transformer": ({"name": "transformer", "width": 8, "heads": 2}, TEXT),
}


def named_model(name: str, seed: int = 0) -> tuple[Model, Dataset]:
    """One of ALL_MODELS with data that it fits."""
    keys, shape = ALL_MODELS[name]
    data = dataset(*shape)
    return build_model(ModelConfig(**keys), data, seed), data
