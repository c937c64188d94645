import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.network import Topology, TopologyConfig, make_topology


def test_ring_has_two_neighbors_each_and_small_rings_are_an_edge_and_a_point():
    assert make_topology("ring", 5).adjacency == ((1, 4), (0, 2), (1, 3), (2, 4), (0, 3))
    assert make_topology("ring", 2).adjacency == ((1,), (0,))
    assert make_topology("ring", 1).adjacency == ((),)


def test_edges_are_listed_once_in_order():
    assert make_topology("ring", 4).edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert make_topology("star", 4).edges == ((0, 1), (0, 2), (0, 3))


def test_torus_is_as_square_as_possible():
    torus = make_topology("torus", 12)  # 3 x 4
    assert torus.neighbors(0) == (1, 3, 4, 8)
    assert torus.is_regular and torus.num_edges == 24 and torus.diameter() == 3


def test_torus_with_given_rows():
    torus = make_topology(TopologyConfig(name="torus", rows=2), 8)
    assert torus.neighbors(0) == (1, 3, 4)  # two rows: up and down are the same node


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_torus_refuses_numbers_without_a_grid(n):
    with pytest.raises(ConfigError, match="2 x 2"):
        make_topology("torus", n)


def test_torus_refuses_rows_that_do_not_divide():
    with pytest.raises(ConfigError, match="rows = 5"):
        make_topology(TopologyConfig(name="torus", rows=5), 12)


def test_complete_is_lazy_and_complete():
    small = make_topology("complete", 4)
    assert [small.neighbors(i) for i in range(4)] == [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]
    assert small.adjacency[-1] == (0, 1, 2) and small.adjacency[1:3] == ((0, 2, 3), (0, 1, 3))
    large = make_topology("complete", 10_000)
    assert large.is_connected() and large.is_complete and not large.is_bipartite()
    assert len(large.neighbors(17)) == large.degree(17) == 9_999
    assert large.num_edges == 49_995_000 and large.diameter() == 1
    assert make_topology("complete", 1).neighbors(0) == ()


def test_bipartite_complete_joins_even_with_odd():
    graph = make_topology("bipartite-complete", 5)
    assert graph.sides() == ((0, 2, 4), (1, 3))
    assert graph.neighbors(1) == (0, 2, 4) and graph.neighbors(4) == (1, 3)


def test_large_bipartite_graph_is_checked_quickly_because_sides_share_a_row():
    graph = make_topology("bipartite-complete", 10_000)
    assert graph.is_connected() and len(graph.sides()[0]) == 5_000


def test_exponential_distances_are_powers_of_two():
    assert make_topology("exponential", 8).neighbors(0) == (1, 2, 4, 6, 7)
    assert make_topology("exponential", 1).neighbors(0) == ()
    assert make_topology("exponential", 2).neighbors(0) == (1,)


@pytest.mark.parametrize(("n", "degree"), [(2, 1), (10, 3), (10, 7), (9, 8), (50, 4), (12, 6), (300, 3)])
def test_random_regular_is_regular_connected_and_keyed(n, degree):
    config = TopologyConfig(name="random-regular", degree=degree)
    graph = make_topology(config, n, seed=1)
    assert {graph.degree(i) for i in range(n)} == {degree}
    assert graph.is_connected()
    assert all(i in graph.neighbors(j) and i != j for i in range(n) for j in graph.neighbors(i))
    assert graph.adjacency == make_topology(config, n, seed=1).adjacency
    if n == 50:
        assert graph.adjacency != make_topology(config, n, seed=2).adjacency


@pytest.mark.parametrize(("n", "degree"), [(5, 3), (4, 4), (6, 1), (6, 0)])
def test_random_regular_refuses_what_cannot_be(n, degree):
    with pytest.raises(ConfigError, match="degree"):
        make_topology(TopologyConfig(name="random-regular", degree=degree), n)


def test_erdos_renyi_draws_connected_graphs_of_the_asked_density():
    graph = make_topology(TopologyConfig(name="erdos-renyi", edge_probability=0.05), 1000, seed=3)
    expected = 0.05 * 1000 * 999 / 2
    assert graph.is_connected()
    assert abs(graph.num_edges - expected) < 5 * np.sqrt(expected)
    assert graph.adjacency == make_topology(graph_config(0.05), 1000, seed=3).adjacency
    assert graph.adjacency != make_topology(graph_config(0.05), 1000, seed=4).adjacency


def graph_config(p):
    return TopologyConfig(name="erdos-renyi", edge_probability=p)


def test_erdos_renyi_extremes():
    assert make_topology(graph_config(1.0), 30).is_complete
    assert make_topology(graph_config(0.0), 1).n == 1
    for p in (0.0, 1e-300, 0.001):
        with pytest.raises(ConfigError, match="no connected graph in 100 draws over 50 nodes"):
            make_topology(graph_config(p), 50)


def test_erdos_renyi_joins_every_pair_equally_often():
    counts = np.zeros((5, 5))
    for seed in range(800):
        for i, j in make_topology(graph_config(0.7), 5, seed).edges:
            counts[i, j] += 1
    upper = counts[np.triu_indices(5, 1)]
    assert upper.min() > 0 and (upper.max() - upper.min()) / upper.mean() < 0.2


def test_sides_start_with_each_components_lowest_id():
    graph = Topology.of_edges("two pieces", 6, [(1, 4), (5, 2), (0, 3)])
    assert graph.sides() == ((0, 1, 2), (3, 4, 5))
    assert not graph.is_connected()
    with pytest.raises(ValueError, match="not connected"):
        graph.diameter()


def test_odd_rings_are_not_bipartite():
    assert make_topology("ring", 6).sides() == ((0, 2, 4), (1, 3, 5))
    assert not make_topology("ring", 5).is_bipartite()
    with pytest.raises(ConfigError, match="bipartite"):
        make_topology("ring", 5).sides()


@pytest.mark.parametrize("name", ["edges.txt", "edges.json", "wrapped.json"])
def test_graph_files(tmp_path, name):
    texts = {
        "edges.txt": "# a path\n0 1\n\n2 1  # back\n0 1\n",
        "edges.json": "[[0, 1], [2, 1]]",
        "wrapped.json": '{"edges": [[0, 1], [1, 2]]}',
    }
    (tmp_path / name).write_text(texts[name])
    graph = make_topology(str(tmp_path / name), 3)
    assert graph.adjacency == ((1,), (0, 2), (1,))
    same = make_topology(TopologyConfig(name="file", file=tmp_path / name), 3)
    assert same == graph


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "0 1\n1 3\n", "line 2"),
        ("a.txt", "0 1\n1 x\n", "line 2: 1 x"),
        ("a.txt", "0 1 2\n", "line 1"),
        ("a.txt", "1 1\n", "line 1"),
        ("a.json", "[[0, 1], [0, -1]]", "edge 1"),
        ("a.json", "[[0, true]]", "edge 0"),
        ("a.json", '{"links": []}', "JSON with"),
        ("a.json", "[", "JSON:"),
    ],
)
def test_wrong_graph_files_are_refused_with_the_place(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        make_topology(str(tmp_path / name), 3)


def test_missing_graph_file():
    with pytest.raises(ConfigError, match="readable graph file"):
        make_topology("nowhere.txt", 3)


def test_unknown_names_foreign_keys_and_missing_keys():
    with pytest.raises(ConfigError, match="did you mean 'torus'"):
        make_topology("tours", 4)
    with pytest.raises(ConfigError, match=r"degree = 3: not for ring"):
        make_topology(TopologyConfig(name="ring", degree=3), 4)
    with pytest.raises(ConfigError, match="random-regular needs it"):
        make_topology("random-regular", 4)
    with pytest.raises(ConfigError, match="at least 1 node"):
        make_topology("ring", 0)
