"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgefl.data.config import DataConfig
from edgefl.data.dataset import Dataset
from edgefl.data.digits import load_digits
from edgefl.data.fashion import load_fashion
from edgefl.data.folder import load_folder
from edgefl.data.synthetic import load_synthetic
from edgefl.data.text import load_text
from edgefl.errors import ConfigError, nearest
from edgefl.keyed import generator

_GENERATED = ("num_owners", "examples_per_owner", "data_seed")
_COMMON = {"name", "partition", "num_train", "num_test"}
SOURCES: dict[str, tuple[Callable[[DataConfig], Dataset], tuple[str, ...]]] = {
    "digits": (load_digits, ()),
    "fashion-mnist": (load_fashion, ("folder",)),
    "synthetic": (
        load_synthetic,
        (*_GENERATED, "alpha", "beta", "model_spread", "num_features", "num_classes"),
    ),
    "text": (load_text, (*_GENERATED, "length")),
    "folder": (load_folder, ("folder",)),
}
"""name: (loader, keys of [data] that this data set takes beside the common ones)"""


def load_dataset(config: DataConfig) -> Dataset:
    """The data set that the [data] table names.

    Raises ConfigError for an unknown name, a key that is not for this data set, and missing or wrong files.
    """
    if config.name not in SOURCES:
        raise ConfigError("data.name", config.name, nearest(config.name, SOURCES))
    loader, own = SOURCES[config.name]
    for key, field in DataConfig.model_fields.items():
        # a resolved file spells out all defaults, so only other values are foreign
        if key not in _COMMON and key not in own and getattr(config, key) != field.default:
            raise ConfigError(f"data.{key}", getattr(config, key), f"not for {config.name}: leave it out")
    return _shortened(loader(config), config)


def _shortened(dataset: Dataset, config: DataConfig) -> Dataset:
    train = _kept(len(dataset.y_train), config.num_train, "num_train")
    test = _kept(len(dataset.y_test), config.num_test, "num_test")
    if train is not None:
        owners = None if dataset.owners is None else dataset.owners[train]
        x, y = dataset.x_train[train], dataset.y_train[train]
        dataset = replace(dataset, x_train=x, y_train=y, owners=owners)
    if test is not None:
        dataset = replace(dataset, x_test=dataset.x_test[test], y_test=dataset.y_test[test])
    return dataset


def _kept(have: int, wanted: int | None, key: str) -> np.ndarray | None:
    """Ascending places of the examples to keep, the same in every run; None for all."""
    if wanted is None:
        return None
    if wanted > have:
        raise ConfigError(f"data.{key}", wanted, f"at most the {have} examples that there are")
    return np.sort(generator(0, key, have).permutation(have)[:wanted])
