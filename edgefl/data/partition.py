"""Dealing a data set to nodes: shares are disjoint and cover all examples, unless reuse is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from edgefl.data.config import PartitionConfig
from edgefl.data.dataset import Dataset
from edgefl.data.local import LocalData
from edgefl.errors import ConfigError, nearest
from edgefl.keyed import generator

KEY = "data.partition"
REDRAWS = 20
"""Draws at most until every node has enough examples; the last one is then repaired."""


def partition(
    dataset: Dataset, num_nodes: int, config: PartitionConfig | None = None, seed: int = 0
) -> list[LocalData]:
    """Each node's share of the training examples, for nodes 0..num_nodes-1; iid where no config is given.

    Raises ConfigError for what cannot be dealt: more nodes than examples or owners, labels that are missing.
    """
    config = config or PartitionConfig()
    if config.name not in _RULES:
        raise ConfigError(f"{KEY}.name", config.name, nearest(config.name, _RULES))
    rule, own = _RULES[config.name]
    for key, field in PartitionConfig.model_fields.items():
        if key not in (*own, "name", "min_examples") and getattr(config, key) != field.default:
            raise ConfigError(f"{KEY}.{key}", getattr(config, key), f"not for {config.name}: leave it out")
    if num_nodes < 1:
        raise ConfigError("nodes", num_nodes, "at least one node with data")
    if _too_few(dataset, num_nodes, config):
        shares = _reused(dataset, num_nodes, config, seed)
    else:
        shares = rule(dataset, num_nodes, config, seed)
    return [LocalData(dataset, indices, node, seed) for node, indices in enumerate(shares)]


def label_table(parts: Sequence[LocalData], num_classes: int) -> np.ndarray:
    """(nodes, classes) int64: examples of each label at each node of a classification."""
    return np.stack(
        [np.bincount(part.dataset.y_train.numpy()[part.indices], minlength=num_classes) for part in parts]
    )


def _too_few(dataset: Dataset, num_nodes: int, config: PartitionConfig) -> bool:
    have, need = len(dataset.y_train), num_nodes * config.min_examples
    if have >= need:
        return False
    if not config.allow_reuse:
        way = "; or set allow_reuse" if config.name in ("iid", "dirichlet") else ""
        found = f"{num_nodes} nodes with {config.min_examples} each need {need} examples"
        raise ConfigError(f"{KEY}.min_examples", config.min_examples, f"{found}, there are {have}{way}")
    return True


def _reused(dataset: Dataset, num_nodes: int, config: PartitionConfig, seed: int) -> list[np.ndarray]:
    """Each node's examples drawn with replacement; for dirichlet, by a mix of labels of its own.

    Source of the latter: Hsu et al. 2019, section 3 (https://arxiv.org/abs/1909.06335), uniform prior.
    """
    size = max(config.reuse_examples, config.min_examples)
    if config.name == "iid":
        everything = len(dataset.y_train)
        return [generator(seed, "reuse", i).integers(0, everything, size) for i in range(num_nodes)]
    by_label = _by_label(dataset, config.name)
    shares = []
    for i in range(num_nodes):
        rng = generator(seed, "reuse", i)
        counts = rng.multinomial(size, _dirichlet(rng, config.alpha, len(by_label)))
        drawn = [rng.choice(by_label[c], counts[c]) for c in np.flatnonzero(counts)]
        shares.append(np.concatenate(drawn))
    return shares


def _iid(dataset: Dataset, num_nodes: int, config: PartitionConfig, seed: int) -> list[np.ndarray]:
    """Equal sizes, to one example, after one shuffle."""
    return np.array_split(generator(seed, "iid").permutation(len(dataset.y_train)), num_nodes)


def _by_dirichlet(dataset: Dataset, num_nodes: int, config: PartitionConfig, seed: int) -> list[np.ndarray]:
    """Each label is split among the nodes by a draw from Dirichlet(alpha).

    Source: Yurochkin et al. 2019, section 4 (https://arxiv.org/abs/1905.12022).
    """
    by_label = _by_label(dataset, config.name)

    def draw(rng: np.random.Generator) -> list[np.ndarray]:
        pieces: list[list[np.ndarray]] = [[] for _ in range(num_nodes)]
        for members in by_label:
            sizes = _sizes(len(members), _dirichlet(rng, config.alpha, num_nodes))
            split = np.split(rng.permutation(members), sizes.cumsum()[:-1])
            for node in np.flatnonzero(sizes):
                pieces[node].append(split[node])
        return [np.concatenate(piece) if piece else np.zeros(0, dtype=np.int64) for piece in pieces]

    return _with_least(draw, "dirichlet", config, seed)


def _by_quantity(dataset: Dataset, num_nodes: int, config: PartitionConfig, seed: int) -> list[np.ndarray]:
    """Shuffled labels, sizes by a draw from Dirichlet(alpha) (Li et al. 2022, https://arxiv.org/abs/2102.02079)."""
    have = len(dataset.y_train)

    def draw(rng: np.random.Generator) -> list[np.ndarray]:
        sizes = _sizes(have, _dirichlet(rng, config.alpha, num_nodes))
        return np.split(rng.permutation(have), sizes.cumsum()[:-1])

    return _with_least(draw, "quantity", config, seed)


def _by_shards(dataset: Dataset, num_nodes: int, config: PartitionConfig, seed: int) -> list[np.ndarray]:
    """Examples in order of label, cut into equal shards, dealt at random (McMahan et al. 2017, section 3)."""
    by_label = _by_label(dataset, config.name)
    per_node, have = config.shards_per_node, len(dataset.y_train)
    labels = sum(len(members) > 0 for members in by_label)
    if per_node > labels:
        raise ConfigError(f"{KEY}.shards_per_node", per_node, f"more label shards than labels ({labels})")
    if per_node * num_nodes > have:
        need = f"at most {have // num_nodes} for {num_nodes} nodes with {have} examples"
        raise ConfigError(f"{KEY}.shards_per_node", per_node, need)
    shards = np.array_split(np.concatenate(by_label), per_node * num_nodes)
    deal = generator(seed, "shards").permutation(len(shards)).reshape(num_nodes, per_node)
    shares = [np.concatenate([shards[s] for s in hand]) for hand in deal]
    return _repaired(shares, config.min_examples)


def _by_owner(dataset: Dataset, num_nodes: int, config: PartitionConfig, seed: int) -> list[np.ndarray]:
    """Natural owners, shuffled and dealt in turn: each owner's examples stay together."""
    if dataset.owners is None:
        raise ConfigError(f"{KEY}.name", "owner", f"data with natural owners; {dataset.name} has none")
    owners = np.unique(dataset.owners)
    if num_nodes > len(owners):
        raise ConfigError(
            f"{KEY}.name", "owner", f"at most {len(owners)} nodes, one per owner; {num_nodes} asked"
        )
    grouped = np.argsort(dataset.owners, kind="stable")
    members = np.split(grouped, np.searchsorted(dataset.owners[grouped], owners[1:]))
    deal = generator(seed, "owner").permutation(len(owners))
    shares = [np.concatenate([members[o] for o in deal[node::num_nodes]]) for node in range(num_nodes)]
    short = [node for node, share in enumerate(shares) if len(share) < config.min_examples]
    if short:
        found = f"node {short[0]}'s owners have {len(shares[short[0]])} examples"
        raise ConfigError(
            f"{KEY}.min_examples", config.min_examples, f"{found}; lower it, or take fewer nodes"
        )
    return shares


def _by_label(dataset: Dataset, name: str) -> list[np.ndarray]:
    """Places of each label's examples, ascending."""
    if dataset.task != "classification":
        raise ConfigError(f"{KEY}.name", name, f"data with class labels; {dataset.name} is {dataset.task}")
    labels = dataset.y_train.numpy()
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.searchsorted(labels[order], np.arange(1, dataset.num_classes)))


def _dirichlet(rng: np.random.Generator, alpha: float, size: int) -> np.ndarray:
    """(size,) shares that sum to 1. For a tiny alpha every gamma draw may be zero: then one takes all."""
    drawn = rng.gamma(alpha, size=size)
    if not drawn.sum() > 0:
        drawn = np.zeros(size)
        drawn[rng.integers(size)] = 1.0
    return np.asarray(drawn / drawn.sum())


def _sizes(total: int, shares: np.ndarray) -> np.ndarray:
    """Whole numbers near total x shares that sum to total: differences of the rounded running sum."""
    ends = np.rint(shares.cumsum() * total).astype(np.int64)
    ends[-1] = total
    return np.diff(ends, prepend=0)


def _with_least(
    draw: Callable[[np.random.Generator], list[np.ndarray]], name: str, config: PartitionConfig, seed: int
) -> list[np.ndarray]:
    for attempt in range(REDRAWS):
        shares = draw(generator(seed, name, attempt))
        if min(map(len, shares)) >= config.min_examples:
            return shares
    return _repaired(shares, config.min_examples)


def _repaired(shares: list[np.ndarray], least: int) -> list[np.ndarray]:
    """Move examples, one by one, from whoever has most to those below the least; there are enough in all."""
    lists = [share.tolist() for share in shares]
    largest = [(-len(held), node) for node, held in enumerate(lists)]
    heapify(largest)
    for held in lists:
        while len(held) < least:
            size, giver = heappop(largest)
            if -size != len(lists[giver]):  # grew since: that one was short itself
                heappush(largest, (-len(lists[giver]), giver))
                continue
            held.append(lists[giver].pop())
            heappush(largest, (-len(lists[giver]), giver))
    return [np.array(held, dtype=np.int64) for held in lists]


_RULES: dict[
    str,
    tuple[Callable[[Dataset, int, PartitionConfig, int], list[np.ndarray]], tuple[str, ...]],
] = {
    "iid": (_iid, ("allow_reuse", "reuse_examples")),
    "dirichlet": (_by_dirichlet, ("alpha", "allow_reuse", "reuse_examples")),
    "shards": (_by_shards, ("shards_per_node",)),
    "quantity": (_by_quantity, ("alpha",)),
    "owner": (_by_owner, ()),
}
"""name: (rule, keys of [data.partition] that it takes beside the common ones)"""
