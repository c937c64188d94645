import numpy as np
import pytest
import torch

from edgefl.data import Dataset, LocalData


def dataset(n=40):
    x = torch.arange(n, dtype=torch.float32).reshape(n, 1)
    y = torch.arange(n) % 4
    return Dataset("toy", "classification", x, y, x[:4], y[:4], num_classes=4)


def share(indices, node=1, seed=5):
    return LocalData(dataset(), np.array(indices, dtype=np.int64), node, seed)


def test_an_epoch_is_a_permutation_of_the_share_and_epochs_differ():
    data = share(range(3, 30))
    first, second = data.epoch(0), data.epoch(1)
    assert sorted(first) == sorted(second) == list(range(3, 30))
    assert first.tolist() != second.tolist()


def test_batches_are_a_function_of_the_step_alone():
    data, again = share(range(10)), share(range(10))
    in_order = [data.batch_indices(step, 4).tolist() for step in range(9)]
    backwards = [again.batch_indices(step, 4).tolist() for step in reversed(range(9))]
    assert in_order == backwards[::-1]
    assert [len(batch) for batch in in_order] == [4, 4, 2] * 3
    assert sorted(i for batch in in_order[3:6] for i in batch) == list(range(10))


def test_node_and_seed_shuffle_differently():
    orders = {tuple(share(range(20), node, seed).epoch(0)) for node in (0, 1) for seed in (5, 6)}
    assert len(orders) == 4


def test_batch_holds_the_examples_of_its_indices():
    data = share([7, 9, 11])
    batch = data.batch(0, 2)
    places = data.batch_indices(0, 2)
    assert len(batch) == 2
    assert batch.x.flatten().tolist() == places.tolist()
    assert batch.y.tolist() == [place % 4 for place in places.tolist()]


def test_without_data_there_is_no_batch():
    with pytest.raises(ValueError, match="node 1 has no data"):
        share([]).batch_indices(0, 4)


def test_a_node_keeps_one_order_only():
    data = share(range(400))
    kept = data.epoch(3)
    assert np.shares_memory(data.epoch(3), kept)
    data.epoch(4)
    assert not np.shares_memory(data.epoch(3), kept) and data.epoch(3).tolist() == kept.tolist()


def test_small_nodes_draw_orders_in_blocks_that_do_not_depend_on_when_they_are_asked_for():
    data, again = share(range(20)), share(range(20))
    orders = [data.epoch(e).tolist() for e in range(40)]
    assert [again.epoch(e).tolist() for e in reversed(range(40))] == orders[::-1]
    assert len({tuple(order) for order in orders}) == 40
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_consecutive_batches_are_those_given_one_by_one():
    data = share(range(11))
    one_by_one = [data.batch_indices(step, 4).tolist() for step in range(2, 12)]
    assert [rows.tolist() for rows in data.batches(range(2, 12), 4)] == one_by_one
    assert [len(rows) for rows in data.batches(range(3), 4)] == [4, 4, 3]


@pytest.mark.parametrize("size", [1, 3, 11, 16, 300, 600])
def test_rows_fill_short_batches_up_with_their_own_first_example(size):
    data, steps = share(range(size)), range(7, 120)
    (rows, weights), sizes = data.cut(steps, 8), data.sizes(steps, 8)
    fitting = -(-size // 4) * 4
    assert rows.shape == (len(steps), min(8, fitting))
    assert data.cut(range(1), 700)[0].shape == (1, fitting)
    for row, batch, length in zip(rows, data.batches(steps, 8), sizes, strict=True):
        assert row[:length].tolist() == batch.tolist() and len(batch) == length
        assert set(row[length:]) <= {row[0]}
    for weight, length in zip(weights, sizes, strict=True):
        assert weight.tolist() == [np.float32(1 / length)] * length + [0.0] * (rows.shape[1] - length)
    assert rows[5].tolist() == data.cut(range(12, 13), 8)[0][0].tolist()
