"""Rings: decompositions of K_n proved arc by arc, and rings over nodes (THEORY 1)."""

import itertools
import time

import numpy as np
import pytest

from tasp_core import Rings, TopologyError, decompose
from tasp_core.cli import app as cli
from tasp_core.schedules.hamiltonian import node_rings

NODES = [(m, u) for m in (2, 4, 6, 8) for u in (2, 3, 4, 5)]


def arcs(rings):
    """(src, dst) of every arc, rows in ring order, the closing arc last."""
    table = np.asarray(rings.cycles, dtype=np.int64)
    following = np.concatenate([table[:, 1:], table[:, :1]], axis=1)
    return np.stack([table, following], axis=-1)


def prove_decomposition(n):
    rings = decompose(n)
    fold = 2 if n in (4, 6) else 1
    assert rings.fold == fold
    assert len(rings) == fold * (n - 1)
    assert all(sorted(cycle) == list(range(n)) for cycle in rings.cycles)
    src, dst = arcs(rings).reshape(-1, 2).T
    used = np.bincount(src * n + dst, minlength=n * n).reshape(n, n)
    assert (used[~np.eye(n, dtype=bool)] == fold).all()
    assert (np.diag(used) == 0).all()


@pytest.mark.parametrize("n", range(2, 65))
def test_every_ordered_pair_is_used_fold_times(n):
    prove_decomposition(n)


@pytest.mark.parametrize("n", [127, 128, 254, 255, 256, 257, 510])
def test_larger_decompositions(n):
    prove_decomposition(n)


def test_one_rank_has_no_rings():
    rings = decompose(1)
    assert len(rings) == 0
    assert rings.cycles == ()
    assert rings.verify() is rings


def test_1024_ranks_take_less_than_a_second():
    begin = time.process_time()
    rings = decompose(1024)
    assert time.process_time() - begin < 1
    assert len(rings) == 1023
    rings.verify()


@pytest.mark.parametrize(
    ("n", "last"),
    [(8, (7, 2, 3, 5, 1, 6, 0, 4)), (10, (9, 8, 7, 1, 2, 3, 5, 6, 0, 4))],
)
def test_last_cycle_of_the_theory(n, last):
    assert decompose(n).cycles[-1] == last


@pytest.mark.parametrize("n", [8, 10, 12, 14, 30, 32])
def test_rainbow_path_takes_one_arc_of_each_zigzag_cycle(n):
    """THEORY 1.2: with point B taken out, each other cycle lacks exactly one of its own arcs."""
    middle = n - 2
    colour = {(middle, x): x for x in range(middle)}
    colour |= {(x, middle): (x + n // 2 - 1) % middle for x in range(middle)}
    zigzag = [(t + 1) // 2 if t % 2 else -t // 2 for t in range(middle)]
    for i in range(middle):
        walk = [(i + z) % middle for z in zigzag]
        colour |= dict.fromkeys(itertools.pairwise(walk), i)
    path = decompose(n).cycles[-1][1:]
    colours = [colour[arc] for arc in itertools.pairwise(path)]
    assert sorted(colours) == list(range(middle))


@pytest.mark.parametrize("n", [4, 6])
def test_fold_two_is_a_set_of_cycles_and_their_reverses(n):
    cycles = decompose(n).cycles

    def turned(cycle):
        return cycle[cycle.index(0) :] + cycle[: cycle.index(0)]

    forward, back = cycles[: n - 1], cycles[n - 1 :]
    assert {turned(c[::-1]) for c in forward} == {turned(c) for c in back}
    assert len({turned(c) for c in cycles}) == 2 * (n - 1)


def test_pair_counts_match_the_arcs():
    rings = decompose(9)
    expected = np.zeros((9, 9), dtype=np.int64)
    for cycle in rings.cycles:
        for at, src in enumerate(cycle):
            expected[src, cycle[(at + 1) % 9]] += 1
    assert (rings.pair_counts() == expected).all()


@pytest.mark.parametrize("rail_aligned", [False, True])
@pytest.mark.parametrize(("m", "u"), NODES)
def test_paths_through_nodes(m, u, rail_aligned):
    """THEORY 1.4: every pair inside a node once, every NIC one share out and one in."""
    rings = node_rings(m, u, rail_aligned=rail_aligned)
    assert len(rings) == m
    assert all(sorted(cycle) == list(range(m * u)) for cycle in rings.cycles)
    src, dst = arcs(rings).reshape(-1, 2).T
    inside = src // m == dst // m
    pairs = sorted(zip(src[inside].tolist(), dst[inside].tolist(), strict=True))
    ranks = range(m * u)
    assert pairs == [(a, b) for a in ranks for b in ranks if a != b and a // m == b // m]
    for side in (src, dst):
        assert sorted(side[~inside].tolist()) == list(ranks)
    assert ((dst[~inside] // m - src[~inside] // m) % u == 1).all()


@pytest.mark.parametrize(("m", "u"), NODES)
def test_hops_that_change_their_rail(m, u):
    """THEORY 1.4: as published every one does; aligned none for even u, one border's for odd u."""
    changes = {}
    for rail_aligned in (False, True):
        src, dst = arcs(node_rings(m, u, rail_aligned=rail_aligned)).reshape(-1, 2).T
        moved = (src // m != dst // m) & (src % m != dst % m)
        changes[rail_aligned] = (int(moved.sum()), set((src[moved] // m).tolist()))
    assert changes[False][0] == m * u
    assert changes[True][0] == (m if u % 2 else 0)
    assert len(changes[True][1]) == u % 2


def test_published_rings_enter_each_node_at_their_own_index():
    for index, cycle in enumerate(node_rings(8, 3, rail_aligned=False).cycles):
        assert [cycle[8 * k] for k in range(3)] == [index, 8 + index, 16 + index]


def broken(n, change):
    array = np.array(decompose(n).array)
    change(array)
    return Rings(array, decompose(n).fold)


def repeat_a_rank(array):
    array[3, 2] = array[3, 5]


def leave_the_range(array):
    array[1, 0] = array.shape[1]


@pytest.mark.parametrize(("change", "ring"), [(repeat_a_rank, 3), (leave_the_range, 1)])
def test_verify_refuses_a_row_that_is_no_cycle(change, ring):
    with pytest.raises(TopologyError, match=rf"ring {ring} is not a Hamiltonian cycle of 9 ranks"):
        broken(9, change).verify()


def use_a_ring_twice(array):
    array[1] = array[0]


def swap_two_neighbours(array):
    array[2, [3, 4]] = array[2, [4, 3]]


@pytest.mark.parametrize("change", [use_a_ring_twice, swap_two_neighbours])
def test_verify_refuses_uneven_links(change):
    rings = broken(9, change)
    with pytest.raises(TopologyError, match=r"link \d+>\d+ is used [02] times, expected 1"):
        rings.verify()


def test_verify_refuses_a_wrong_fold_and_a_missing_ring():
    with pytest.raises(TopologyError, match="link 0>1 is used 1 times, expected 2"):
        Rings(decompose(7).array, 2).verify()
    with pytest.raises(TopologyError, match="is used 0 times, expected 1"):
        Rings(decompose(7).array[:-1], 1).verify()


def test_verify_accepts_what_is_right():
    for n in (2, 3, 4, 5, 6, 8, 13):
        assert decompose(n).verify() is decompose(n)
    assert node_rings(4, 3, rail_aligned=True).verify().fold == 0


@pytest.mark.parametrize("n", [0, -1, -8, 2.5])
def test_bad_numbers_of_ranks(n):
    with pytest.raises(TopologyError, match=r"whole number >= 1, got"):
        decompose(n)


@pytest.mark.parametrize("n", [float("nan"), float("inf"), "8", None])
def test_values_that_are_no_numbers_of_ranks(n):
    with pytest.raises(TopologyError, match=r"whole number >= 1, got"):
        decompose(n)


def test_a_whole_float_is_taken_as_the_number_or_refused():
    try:
        rings = decompose(70.0)
    except TopologyError:
        return
    assert len(rings) == 69


@pytest.mark.parametrize("rings", [decompose(11), node_rings(4, 2, rail_aligned=False)])
def test_cached_rings_cannot_be_changed(rings):
    assert not rings.array.flags.writeable


@pytest.mark.parametrize(
    ("m", "u", "advice"),
    [(3, 2, "even number of ranks per node, got 3"), (0, 2, "got 0"), (1, 4, "got 1")],
)
def test_paths_need_an_even_node(m, u, advice):
    with pytest.raises(TopologyError, match=advice):
        node_rings(m, u, rail_aligned=False)


@pytest.mark.parametrize("u", [1, 0])
def test_paths_need_two_nodes(u):
    with pytest.raises(TopologyError, match=rf"at least 2 nodes, got {u}"):
        node_rings(4, u, rail_aligned=True)


def test_rings_that_do_not_fit_into_memory_are_one_line(monkeypatch, capsys):
    def full(n):
        raise MemoryError("Unable to allocate 74.5 GiB")

    monkeypatch.setattr(cli, "decompose", full)
    monkeypatch.setattr("sys.argv", ["tasp_core", "rings", "100000"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: Unable to allocate 74.5 GiB\n"
