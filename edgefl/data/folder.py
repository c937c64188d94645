"""A user's own data: arrays in an .npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from edgefl.data.config import DataConfig
from edgefl.data.dataset import Dataset, Task
from edgefl.errors import ConfigError

REQUIRED = ("x_train", "y_train", "x_test", "y_test")


def load_folder(config: DataConfig) -> Dataset:
    """x_train, y_train, x_test, y_test and, if there, owners, from an .npz file; nothing is unpickled.

    Inputs (n, ...) numbers with (n,) integers: classification, labels from 0. With (n,) or (n, targets)
    floats: regression. Integer inputs (n, length) with integers of the same shape: language.
    owners: (n,) integers or strings, one per training example.
    Raises ConfigError naming the array that is missing or wrong.
    """
    path = _npz(config.folder)
    arrays = _read(path)
    for part in ("train", "test"):
        if not len(arrays[f"x_{part}"]) or len(arrays[f"x_{part}"]) != len(arrays[f"y_{part}"]):
            sizes = f"{len(arrays[f'x_{part}'])} inputs and {len(arrays[f'y_{part}'])} targets"
            raise _wrong(path, f"x_{part}", f"as many inputs as targets, at least one; found {sizes}")
    for letter in "xy":
        train, test = arrays[f"{letter}_train"], arrays[f"{letter}_test"]
        if train.shape[1:] != test.shape[1:] or train.dtype.kind != test.dtype.kind:
            wanted, found = (f"{part.shape[1:]} {part.dtype}" for part in (train, test))
            raise _wrong(path, f"{letter}_test", f"examples of {wanted} as in training; found {found}")
    task = _task(path, arrays)
    for name in REQUIRED:
        arrays[name] = _converted(path, name, arrays[name], task)
    num_classes = _num_classes(path, arrays, task)
    x_train, y_train, x_test, y_test = (torch.from_numpy(arrays[name]) for name in REQUIRED)
    owners = _owners(path, arrays)
    return Dataset(path.stem, task, x_train, y_train, x_test, y_test, num_classes, owners)


def _wrong(path: Path, name: str, need: str) -> ConfigError:
    return ConfigError("data.folder", str(path), f"{name}: {need}")


def _npz(folder: Path | None) -> Path:
    if folder is None:
        raise ConfigError("data.folder", None, "an .npz file, or a folder that holds one")
    if folder.is_dir():
        found = sorted(folder.glob("*.npz"))
        if len(found) != 1:
            raise ConfigError("data.folder", str(folder), f"a folder with one .npz file; it has {len(found)}")
        return found[0]
    if not folder.is_file():
        raise ConfigError("data.folder", str(folder), "an .npz file that is there")
    return folder


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as raw:
            arrays = _arrays(np.load(raw, allow_pickle=False), path)
    except ConfigError:
        raise
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError("data.folder", str(path), f"a readable .npz file ({error})") from error
    except ValueError as error:
        raise ConfigError(
            "data.folder", str(path), f"plain arrays, without Python objects ({error})"
        ) from error
    for name, array in arrays.items():
        if array.ndim == 0 or (name in REQUIRED and array.dtype.kind not in "iufb"):
            raise _wrong(path, name, f"an array of numbers, one row per example; found {array.dtype}")
    return arrays


def _arrays(file: object, path: Path) -> dict[str, np.ndarray]:
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise ConfigError("data.folder", str(path), "an .npz file with several named arrays")
    missing = [name for name in REQUIRED if name not in file.files]
    if missing:
        raise _wrong(path, missing[0], f"an array of this name; found {', '.join(file.files) or 'none'}")
    return {name: file[name] for name in (*REQUIRED, "owners") if name in file.files}


def _task(path: Path, arrays: dict[str, np.ndarray]) -> Task:
    x, y = arrays["x_train"], arrays["y_train"]
    if y.dtype.kind == "f" and y.ndim <= 2:
        return "regression"
    if y.dtype.kind in "iu" and y.ndim == 1:
        return "classification"
    if y.dtype.kind in "iu" and x.dtype.kind in "iu" and y.ndim == 2 and y.shape == x.shape:
        return "language"
    raise _wrong(
        path, "y_train", f"(n,) integers, (n, targets) floats, or tokens like x; found {y.shape} {y.dtype}"
    )


def _converted(path: Path, name: str, array: np.ndarray, task: Task) -> np.ndarray:
    """float32 inputs and regression targets, int64 labels and tokens."""
    if task == "language" or (task == "classification" and name[0] == "y"):
        return array.astype(np.int64)
    if not np.isfinite(array).all():
        raise _wrong(path, name, f"finite numbers; row {_first_bad_row(array)} holds NaN or inf")
    real = array.astype(np.float32)
    return real.reshape(-1, 1) if name[0] == "y" and real.ndim == 1 else real


def _first_bad_row(array: np.ndarray) -> int:
    return int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0])


def _num_classes(path: Path, arrays: dict[str, np.ndarray], task: Task) -> int:
    """Labels or tokens there are; targets of a regression."""
    if task == "regression":
        return int(arrays["y_train"].shape[1])
    names = REQUIRED if task == "language" else ("y_train", "y_test")
    for name in names:
        if arrays[name].min() < 0:
            raise _wrong(path, name, f"labels from 0 up; found {arrays[name].min()}")
    known = max(int(arrays[name].max()) for name in names if name.endswith("train")) + 1
    for name in names:
        if arrays[name].max() >= known:
            raise _wrong(
                path, name, f"labels from 0 to {known - 1} as in training; found {arrays[name].max()}"
            )
    return known


def _owners(path: Path, arrays: dict[str, np.ndarray]) -> np.ndarray | None:
    """(n,) int64: owners numbered in sorted order."""
    if "owners" not in arrays:
        return None
    owners = arrays["owners"]
    if owners.shape != arrays["y_train"].shape[:1] or owners.dtype.kind not in "iuU":
        raise _wrong(
            path, "owners", f"one integer or string per training example; found {owners.shape} {owners.dtype}"
        )
    return np.unique(owners, return_inverse=True)[1].reshape(-1).astype(np.int64)
