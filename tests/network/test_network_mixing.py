import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.network import TopologyConfig, make_mixing, make_topology, metropolis, uniform

GRAPHS = ["ring", "star", "complete", "bipartite-complete", "exponential", "torus"]


def test_metropolis_by_hand_on_a_star():
    W = metropolis(make_topology("star", 4))
    assert W.row(0) == pytest.approx({0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25})
    assert W.row(2) == pytest.approx({0: 0.25, 2: 0.75})
    assert list(W.row(2)) == [0, 2]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("n", [4, 9, 12])
def test_metropolis_is_symmetric_and_doubly_stochastic(name, n):
    graph = make_topology(name, n)
    W = metropolis(graph)
    W.check_doubly_stochastic()
    dense = W.dense()
    assert np.array_equal(dense, dense.T)
    assert all(set(np.flatnonzero(dense[i])) <= {i, *graph.neighbors(i)} for i in range(n))


def test_uniform_shares():
    assert uniform(make_topology("complete", 4)).row(1) == dict.fromkeys(range(4), 0.25)
    assert uniform(make_topology("ring", 6)).row(0) == {0: 1 / 3, 1: 1 / 3, 5: 1 / 3}
    assert uniform(make_topology("ring", 1)).row(0) == {0: 1.0}
    uniform(make_topology("torus", 12)).check_doubly_stochastic()
    with pytest.raises(ConfigError, match="regular"):
        uniform(make_topology("star", 4))


def test_second_eigenvalue_matches_the_closed_form():
    # circulant: eigenvalues of the ring are 1/3 + 2/3 cos(2 pi k / n)
    assert uniform(make_topology("ring", 8)).second_eigenvalue() == pytest.approx(
        1 / 3 + 2 / 3 * np.cos(np.pi / 4)
    )
    assert uniform(make_topology("complete", 8)).second_eigenvalue() == pytest.approx(0.0, abs=1e-12)
    assert metropolis(make_topology("ring", 1)).second_eigenvalue() == 0.0


def test_a_row_of_a_large_complete_graph_needs_no_matrix():
    assert len(metropolis(make_topology("complete", 10_000)).row(3)) == 10_000


def test_rows_are_the_callers_own():
    W = metropolis(make_topology("ring", 5))
    W.row(0).clear()
    assert len(W.row(0)) == 3


@pytest.mark.parametrize("suffix", [".csv", ".npy"])
def test_files_hold_any_doubly_stochastic_matrix(tmp_path, suffix):
    directed = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])
    path = save(tmp_path, directed, suffix)
    W = make_mixing(str(path), make_topology("complete", 3))
    assert W.row(1) == {1: 0.5, 2: 0.5}
    assert np.array_equal(W.dense(), directed)
    assert W.second_eigenvalue() == pytest.approx(0.5)


def save(folder, matrix, suffix):
    path = folder / f"w{suffix}"
    if suffix == ".npy":
        np.save(path, matrix)
    else:
        np.savetxt(path, matrix, delimiter=",")
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda W: W[:2], "3 x 3 for 3 nodes; it is 2 x 3"),
        (lambda W: W + np.diag([0, 0.1, 0]), "row 1 sums to 1.1"),
        (lambda W: [[1, 0, 0], [1, 0, 0], [0, 0, 1]], "column 0 sums to 2"),
        (lambda W: [[1.5, -0.5, 0], [-0.5, 1.5, 0], [0, 0, 1]], "row 0 holds -0.5"),
        (lambda W: W * np.nan, "row 0"),
        (lambda W: np.full((3, 3), 1 / 3), "row 0 takes from 2"),
    ],
)
def test_wrong_matrices_are_refused_with_the_row(tmp_path, change, said):
    chain = make_topology(TopologyConfig(name="file", file=edges(tmp_path)), 3)
    good = metropolis(chain).dense()
    with pytest.raises(ConfigError, match=said):
        make_mixing(str(save(tmp_path, np.array(change(good)), ".csv")), chain)


def edges(folder):
    (folder / "chain.txt").write_text("0 1\n1 2\n")
    return folder / "chain.txt"


def test_unreadable_matrices_and_unknown_names(tmp_path):
    graph = make_topology("ring", 3)
    (tmp_path / "w.csv").write_text("1,2\n3\n")
    np.save(tmp_path / "w.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name in ("w.csv", "w.npy", "none.npy"):
        with pytest.raises(ConfigError, match="readable"):
            make_mixing(str(tmp_path / name), graph)
    with pytest.raises(ConfigError, match="did you mean 'metropolis'"):
        make_mixing("metropolitan", graph)
