"""Top-k: which entries, how many bytes, and what a receiver refuses."""

from __future__ import annotations

import pytest
import torch

from edgefl.parameters.sparse import pack_sparse, top_k, unpack_sparse


def test_the_largest_magnitudes_are_chosen_and_ties_go_to_the_lowest_index():
    assert top_k(torch.tensor([1.0, -3.0, 2.0, 3.0, -3.0]), 2).tolist() == [1, 3]
    assert top_k(torch.zeros(5), 2).tolist() == [0, 1]
    assert top_k(torch.tensor([1.0, torch.nan, -torch.inf]), 2).tolist() == [1, 2]


@pytest.mark.parametrize("k", [1, 7, 31, 32, 500, 1000])
def test_packed_and_unpacked_it_is_the_vector_with_the_rest_zero(k):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(k))
    chosen = top_k(values, k)
    expected = torch.zeros(1000)
    expected[chosen] = values[chosen]
    place, entries = pack_sparse(values, chosen)
    assert torch.equal(unpack_sparse(place, entries, 1000), expected)
    assert place.nbytes + entries.nbytes == min(8 * k, 125 + 4 * k)  # indices, or a bitmap where shorter


def test_of_two_equal_ways_the_indices_are_taken():
    values = torch.arange(1.0, 65.0)
    assert pack_sparse(values, top_k(values, 2))[0].dtype is torch.int32
    assert pack_sparse(values, top_k(values, 3))[0].dtype is torch.uint8


@pytest.mark.parametrize(
    ("place", "entries"),
    [
        (torch.tensor([0, 10], dtype=torch.int32), torch.ones(2)),
        (torch.tensor([-1], dtype=torch.int32), torch.ones(1)),
        (torch.tensor([1], dtype=torch.int32), torch.ones(2)),
        (torch.tensor([[1]], dtype=torch.int32), torch.ones(1, 1)),
        (torch.tensor([1], dtype=torch.int32), torch.ones(1, dtype=torch.int64)),
        (torch.tensor([255, 0, 0], dtype=torch.uint8), torch.ones(8)),
        (torch.tensor([255, 0], dtype=torch.uint8), torch.ones(7)),
    ],
    ids=[
        "outside",
        "negative",
        "too many entries",
        "two-dimensional",
        "integers",
        "bitmap size",
        "bitmap count",
    ],
)
def test_what_cannot_be_is_refused(place, entries):
    with pytest.raises(ValueError, match="needed"):
        unpack_sparse(place, entries, 10)
