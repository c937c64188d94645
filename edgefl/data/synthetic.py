"""Synthetic(alpha, beta): linear classification whose owners differ by known amounts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from edgefl.data.config import DataConfig
from edgefl.data.dataset import Dataset
from edgefl.keyed import generator

MAX_EXAMPLES = 2000
"""The paper's law of sizes has a tail of tens of thousands; an owner holds at most so many."""
TEST_SHARE = 0.1


def load_synthetic(config: DataConfig) -> Dataset:
    """x: (n, num_features) float32; every owner's last tenth is for the test.

    Owner k: y = argmax(W_k x + b_k) with W_k, b_k entries from N(u_k, 1), u_k from N(0, alpha); x from
    N(v_k, diag(j^-1.2)) with v_k entries from N(B_k, 1), B_k from N(0, beta). Sizes: 50 + a log-normal(4, 2)
    number. beta sets how unlike the owners' inputs are. u_k moves the scores of all classes alike, so alpha
    changes hardly a label, and models differ wholly even at 0: model_spread s sets how unlike they are,
    with W_k = W + N(0, s) and b_k = b + N(0, s) around one W and b; at 0 all owners have the same model.
    Source: FedProx (Li et al. 2020, section 5.1 and appendix C.1, https://arxiv.org/abs/1812.06127).
    Differs from the paper: sizes are cut at 2,000.
    """
    owners = [_owner(config, k) for k in range(config.num_owners)]
    cuts = [len(y) - max(1, round(TEST_SHARE * len(y))) for _, y in owners]
    x_train, y_train = _joined([(x[:cut], y[:cut]) for (x, y), cut in zip(owners, cuts, strict=True)])
    x_test, y_test = _joined([(x[cut:], y[cut:]) for (x, y), cut in zip(owners, cuts, strict=True)])
    owner_of = np.repeat(np.arange(config.num_owners), cuts)
    classes = config.num_classes
    return Dataset("synthetic", "classification", x_train, y_train, x_test, y_test, classes, owner_of)


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*parts, strict=True)
    return torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.concatenate(y))


def _owner(config: DataConfig, k: int) -> tuple[np.ndarray, np.ndarray]:
    """((n, features) float32, (n,) int64) of owner k."""
    rng = generator(config.data_seed, "synthetic", k)
    features, classes = config.num_features, config.num_classes
    u_k, B_k = rng.normal(0, config.alpha**0.5), rng.normal(0, config.beta**0.5)
    W_k = rng.normal(u_k, 1, (features, classes))
    b_k = rng.normal(u_k, 1, classes)
    if config.model_spread is not None:
        common = generator(config.data_seed, "synthetic model")
        W_k = common.standard_normal(W_k.shape) + config.model_spread**0.5 * (W_k - u_k)
        b_k = common.standard_normal(classes) + config.model_spread**0.5 * (b_k - u_k)
    v_k = rng.normal(B_k, 1, features)
    size = config.examples_per_owner or 50 + int(min(rng.lognormal(4, 2), MAX_EXAMPLES - 50))
    spread = np.arange(1, features + 1) ** -0.6  # the root of the variance j^-1.2
    x = v_k + spread * rng.standard_normal((size, features))
    return x.astype(np.float32), (x @ W_k + b_k).argmax(axis=1)
