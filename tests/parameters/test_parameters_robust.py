"""Robust means: limits that are the mean or the median, and hostile vectors that change nothing."""

from __future__ import annotations

import pytest
import torch

from edgefl.parameters.robust import best_by_krum, coordinate_median, krum_scores, trimmed_mean


def rows(n, d=50, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_trimming_nothing_is_the_mean_and_trimming_most_the_median():
    v = rows(7)
    assert torch.allclose(trimmed_mean(v, 0), v.mean(0), rtol=0, atol=1e-7)
    assert torch.equal(trimmed_mean(v, 3), v.median(0).values)
    assert torch.equal(coordinate_median(v), v.median(0).values)


def test_the_median_of_an_even_number_is_between_the_middle_two():
    assert coordinate_median(torch.tensor([[1.0], [9.0], [2.0], [4.0]])).tolist() == [3.0]


def test_segments_do_not_show(monkeypatch):
    v = rows(9, 1000)
    whole = trimmed_mean(v, 2), krum_scores(v, 2)
    monkeypatch.setattr("edgefl.parameters.robust._SEGMENT", 64)
    assert torch.equal(trimmed_mean(v, 2), whole[0])
    assert torch.allclose(krum_scores(v, 2), whole[1], rtol=1e-12)


def test_scores_by_hand():
    v = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0]])  # n - f - 2 = 2 nearest others
    assert krum_scores(v, 1).tolist() == [1 + 4, 1 + 1, 4 + 1, 1 + 64, 1 + 81]
    assert best_by_krum(v, 1, 1) == [1]


def test_krum_returns_an_honest_vector_and_the_best_seven_are_all_honest_ones():
    v = rows(9)
    v[2], v[6] = v[2] + 1e3, v[6] - 1e3
    honest = [0, 1, 3, 4, 5, 7, 8]
    assert best_by_krum(v, 2, 1)[0] in honest
    assert sorted(best_by_krum(v, 2, 7)) == honest


def test_equal_vectors_give_that_vector_and_ties_go_to_the_lowest():
    v = rows(1).repeat(5, 1)
    assert torch.equal(coordinate_median(v), v[0]) and torch.equal(trimmed_mean(v, 1), v[0])
    assert best_by_krum(v, 1, 2) == [0, 1]


def test_too_few_are_refused():
    with pytest.raises(ValueError, match="more than 4 vectors"):
        trimmed_mean(rows(4), 2)
    with pytest.raises(ValueError, match="7 vectors are needed to stand 2"):
        krum_scores(rows(6), 2)
