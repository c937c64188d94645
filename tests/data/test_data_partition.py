import numpy as np
import pytest
import torch

from edgefl.data import Dataset, PartitionConfig, label_table, partition
from edgefl.errors import ConfigError


def dataset(n=600, classes=6, owners=None, task="classification"):
    y = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).permutation(np.arange(n) % classes))
    x = torch.zeros(n, 2)
    return Dataset("toy", task, x, y, x[:1], y[:1], classes, owners)


CONFIGS = [
    PartitionConfig(),
    PartitionConfig(name="dirichlet", alpha=0.3),
    PartitionConfig(name="shards"),
    PartitionConfig(name="quantity", alpha=0.7),
    PartitionConfig(name="owner"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_shares_are_disjoint_cover_everything_and_are_keyed(config):
    data = dataset(owners=np.arange(600) % 17)
    parts = partition(data, 13, config, seed=3)
    assert sorted(np.concatenate([part.indices for part in parts])) == list(range(600))
    assert [part.node for part in parts] == list(range(13)) and {part.seed for part in parts} == {3}
    assert min(map(len, parts)) >= 1
    shares = [part.indices.tolist() for part in parts]
    assert shares == [part.indices.tolist() for part in partition(data, 13, config, seed=3)]
    assert shares != [part.indices.tolist() for part in partition(data, 13, config, seed=4)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_one_node_gets_all(config):
    config = config.model_copy(update={"shards_per_node": 2})
    (part,) = partition(dataset(owners=np.arange(600) % 17), 1, config)
    assert sorted(part.indices) == list(range(600))


def test_iid_sizes_differ_by_one_at_most():
    sizes = [len(part) for part in partition(dataset(), 7)]
    assert max(sizes) - min(sizes) == 1


def test_label_table_counts():
    parts = partition(dataset(), 5, PartitionConfig(name="shards", shards_per_node=1))
    table = label_table(parts, 6)
    assert table.shape == (5, 6) and table.sum() == 600
    assert table.sum(axis=0).tolist() == [100] * 6


def test_small_alpha_skews_labels_and_large_alpha_does_not():
    def skew(alpha):
        table = label_table(partition(dataset(), 10, PartitionConfig(name="dirichlet", alpha=alpha)), 6)
        return (table.max(axis=1) / table.sum(axis=1)).mean()

    assert skew(0.05) > 0.7 > 0.3 > skew(100.0)


def test_shards_give_each_node_few_labels():
    table = label_table(partition(dataset(), 30, PartitionConfig(name="shards", shards_per_node=2)), 6)
    assert ((table > 0).sum(axis=1) <= 2).all()
    assert (table.sum(axis=1) == 20).all()


def test_quantity_skews_sizes_but_not_labels():
    parts = partition(dataset(6000), 10, PartitionConfig(name="quantity", alpha=0.5))
    sizes = np.array([len(part) for part in parts])
    table = label_table(parts, 6)
    assert sizes.max() > 4 * sizes.min()
    assert (table[sizes.argmax()] / sizes.max()).max() < 0.25


def test_owners_stay_together():
    owners = np.arange(600) % 17
    parts = partition(dataset(owners=owners), 5, PartitionConfig(name="owner"))
    held = [set(owners[part.indices]) for part in parts]
    assert sum(map(len, held)) == 17 and {len(h) for h in held} == {3, 4}


@pytest.mark.parametrize("name", ["dirichlet", "quantity"])
def test_repair_gives_everyone_the_least(name):
    config = PartitionConfig(name=name, alpha=0.001, min_examples=9)
    parts = partition(dataset(), 60, config)
    assert min(map(len, parts)) == 9
    assert sorted(np.concatenate([part.indices for part in parts])) == list(range(600))


def test_shares_as_large_as_the_data_allows():
    parts = partition(dataset(), 60, PartitionConfig(name="quantity", alpha=0.01, min_examples=10))
    assert {len(part) for part in parts} == {10}


def test_more_nodes_than_examples_need_reuse():
    with pytest.raises(ConfigError, match=r"10000 nodes .* there are 600; or set allow_reuse"):
        partition(dataset(), 10_000)
    with pytest.raises(ConfigError, match=r"there are 600$"):
        partition(dataset(), 10_000, PartitionConfig(name="shards"))


def test_ten_thousand_nodes_with_reuse():
    parts = partition(dataset(), 10_000, PartitionConfig(allow_reuse=True, reuse_examples=8), seed=1)
    assert len(parts) == 10_000 and {len(part) for part in parts} == {8}
    counts = np.bincount(np.concatenate([part.indices for part in parts]), minlength=600)
    assert counts.min() > 80 and counts.max() < 200  # 133 each on average


def test_reuse_by_dirichlet_skews_labels():
    config = PartitionConfig(name="dirichlet", alpha=0.05, allow_reuse=True, reuse_examples=20)
    table = label_table(partition(dataset(), 700, config), 6)
    assert (table.sum(axis=1) == 20).all()
    assert (table.max(axis=1) / 20).mean() > 0.8
    assert (table.sum(axis=0) / table.sum()).max() < 0.25


@pytest.mark.parametrize(
    ("config", "nodes", "said"),
    [
        (PartitionConfig(name="shards", shards_per_node=7), 5, r"more label shards than labels \(6\)"),
        (PartitionConfig(name="shards", shards_per_node=6), 200, "at most 3 for 200 nodes with 600 examples"),
        (PartitionConfig(name="owner"), 5, "toy has none"),
        (PartitionConfig(name="dirichlt"), 5, "did you mean 'dirichlet'"),
        (PartitionConfig(name="iid", alpha=0.1), 5, "alpha = 0.1: not for iid"),
        (PartitionConfig(name="owner", allow_reuse=True), 5, "allow_reuse = True: not for owner"),
        (PartitionConfig(), 0, "at least one node"),
    ],
)
def test_what_cannot_be_dealt_is_refused(config, nodes, said):
    with pytest.raises(ConfigError, match=said):
        partition(dataset(), nodes, config)


def test_owner_refuses_more_nodes_than_owners_and_too_small_owners():
    data = dataset(owners=np.minimum(np.arange(600), 2))  # two owners hold one example each
    with pytest.raises(ConfigError, match="at most 3 nodes"):
        partition(data, 4, PartitionConfig(name="owner"))
    with pytest.raises(ConfigError, match="owners have 1 examples"):
        partition(data, 3, PartitionConfig(name="owner", min_examples=2))


def test_label_rules_need_labels():
    with pytest.raises(ConfigError, match="toy is regression"):
        partition(dataset(task="regression"), 4, PartitionConfig(name="dirichlet"))
