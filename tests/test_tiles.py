"""Tiles: kernel calls expanded to (query, key) pairs must be exactly the visible ones."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasp_core as tasp
from tasp_core import Documents, PlanError, plan
from tasp_core.sequence.layouts import Pieces
from tasp_core.sequence.tiles import pair_table, rounds, take, tile, working_order

SEEDED = settings(derandomize=True, deadline=None, max_examples=250, database=None)
WINDOWS = st.none() | st.sampled_from([1, 2, 3, 5, 8, 13, 40])
SOURCES = st.sampled_from([("ring", None), ("tasp", None), ("wave", {"blocks": 2}), ("wave", None)])


@st.composite
def meetings(draw):
    """A plan, a rank, and some of the other ranks' units in any order."""
    lengths = draw(st.lists(st.integers(0, 14), max_size=6) | st.lists(st.just(60), max_size=2))
    name, options = draw(SOURCES)
    made = plan(
        Documents.of(lengths, causal=draw(st.booleans()), window=draw(WINDOWS)),
        draw(st.integers(1, 6)),
        schedule=name,
        layout=draw(st.sampled_from(sorted(tasp.layouts()))),
        schedule_options=options,
    )
    rank = draw(st.integers(0, made.ranks - 1))
    per_rank = made.subchunks.parts * made.schedule.num_shares
    others = [u for u in range(len(made.subchunks.low)) if u // per_rank != rank]
    some = st.lists(st.sampled_from(others), unique=True) if others else st.just([])
    chosen = draw(some | st.permutations(others))
    return made, rank, chosen


def pieces_of_units(made, chosen):
    """The pieces of units as key pieces, and the global tokens they should hold."""
    units = made.subchunks
    index = [i for u in chosen for i in range(units.first[u], units.first[u + 1])]
    per_rank = units.parts * made.schedule.num_shares
    tokens = []
    for u in chosen:
        local = made.tokens(u // per_rank)
        tokens += local[units.low[u] : units.low[u] + units.count[u]].tolist()
    return take(units.pieces, np.array(index, dtype=np.int64)), tokens


def expand(made, rank, keys, tiles):
    """Count every (global query, global key) pair of both calls; and each call's rows."""
    queries = made.tokens(rank)
    row = [
        start + i * stride
        for _, count, start, stride, _ in zip(*take(keys, tiles.used), strict=True)
        for i in range(count)
    ]
    pairs, rows = Counter(), {}
    for name in ("full", "causal", "inverse_causal"):
        sequences = getattr(tiles, name)
        rows[name] = Counter()
        for q_lo, q_n, k_lo, k_n in zip(*sequences, strict=True):
            assert q_n > 0
            assert k_n > 0
            assert 0 <= q_lo <= q_lo + q_n <= len(queries)
            assert 0 <= k_lo <= k_lo + k_n <= len(row), "keys outside the working order"
            assert name == "full" or q_n == k_n
            rows[name].update(range(q_lo, q_lo + q_n))
            for i in range(q_n):
                low, high = i * (name == "inverse_causal"), i + 1 if name == "causal" else k_n
                for j in range(low, high):
                    pairs[int(queries[q_lo + i]), int(row[k_lo + j])] += 1
    return pairs, rows


def visible(docs, queries, keys):
    """All pairs of one document, keys not after queries where the mask is causal."""
    q, k = np.asarray(queries, dtype=np.int64), np.asarray(keys, dtype=np.int64)
    seen = docs.document_of(q)[:, None] == docs.document_of(k)[None, :]
    seen &= (k[None, :] <= q[:, None]) | (not docs.causal)
    seen &= abs(k[None, :] - q[:, None]) < (docs.window or docs.total + 1)
    return {(int(q[i]), int(k[j])) for i, j in np.argwhere(seen)}


@SEEDED
@given(meetings())
def test_tiles_are_exactly_the_visible_pairs(meeting):
    made, rank, chosen = meeting
    keys, tokens = pieces_of_units(made, chosen)
    queries = made.layout.pieces(rank)
    tiles = tile(queries, keys, made.docs)
    pairs, rows = expand(made, rank, keys, tiles)
    expected = visible(made.docs, made.tokens(rank), tokens)
    assert set(pairs) == expected
    assert not pairs or max(pairs.values()) == 1
    if made.docs.window_size is None:
        assert not rows["full"] or max(rows["full"].values()) == 1
        assert made.docs.causal or not rows["causal"]
        assert not rows["inverse_causal"]
    areas = pair_table(queries, take(keys, working_order(keys)), made.docs).area
    assert areas.sum() == len(expected)


@SEEDED
@given(meetings())
def test_a_rank_with_itself(meeting):
    made, rank, _ = meeting
    own = made.layout.pieces(rank)
    pairs, rows = expand(made, rank, own, tile(own, own, made.docs))
    assert set(pairs) == visible(made.docs, made.tokens(rank), made.tokens(rank))
    assert not pairs or max(pairs.values()) == 1
    assert made.docs.window_size or not rows["full"] or max(rows["full"].values()) == 1


@SEEDED
@given(meetings())
def test_keys_nobody_sees_are_left_out(meeting):
    """Every used piece is seen by a query, each once, in (document, last token) order."""
    made, rank, chosen = meeting
    keys, _ = pieces_of_units(made, chosen)
    tiles = tile(made.layout.pieces(rank), keys, made.docs)
    used = take(keys, tiles.used)
    seen = {k for _, k in visible(made.docs, made.tokens(rank), np.arange(made.docs.total))}
    for first, last, stride in zip(used.start, used.last, used.stride, strict=True):
        assert seen & set(range(first, last + 1, stride))
    assert len(set(tiles.used.tolist())) == len(tiles.used)
    order = list(zip(used.doc.tolist(), used.last.tolist(), strict=True))
    assert order == sorted(order)


def runs(*triples):
    """Pieces (start, count, stride) of one document, laid end to end."""
    start, count, stride = np.array(triples, dtype=np.int64).T
    return Pieces(np.cumsum(count) - count, count, start, stride, np.zeros(len(start), np.int64))


def calls(sequences):
    return [tuple(map(int, row)) for row in zip(*sequences, strict=True)]


@pytest.mark.parametrize(
    ("queries", "keys", "full", "causal"),
    [
        # a run after, before, and on its keys
        (runs((8, 4, 1)), runs((0, 4, 1)), [(0, 4, 0, 4)], []),
        (runs((0, 4, 1)), runs((8, 4, 1)), [], []),
        (runs((4, 4, 1)), runs((4, 4, 1)), [], [(0, 4, 0, 4)]),
        # zigzag: only the back block sees the keys between
        (runs((0, 2, 1), (14, 2, 1)), runs((4, 3, 1)), [(2, 2, 0, 3)], []),
        # keys in two pieces become one range
        (runs((9, 2, 1)), runs((5, 2, 1), (0, 3, 1)), [(0, 2, 0, 5)], []),
        # stripes: 0 2 4 against 1 3 5 is shifted, against a share of it FULL below the square
        (runs((0, 3, 2)), runs((1, 3, 2)), [], [(1, 2, 0, 2)]),
        (runs((1, 3, 2)), runs((0, 3, 2)), [], [(0, 3, 0, 3)]),
        (runs((1, 3, 2)), runs((0, 2, 2)), [(2, 1, 0, 2)], [(0, 2, 0, 2)]),
    ],
)
def test_tiles_by_hand(queries, keys, full, causal):
    tiles = tile(queries, keys, Documents.of([99]))
    assert calls(tiles.full) == full
    assert calls(tiles.causal) == causal
    assert bool(tiles.used.size) == bool(full or causal)


def test_without_keys_or_queries_there_are_no_calls():
    made = plan([5, 0, 4], 3)
    own, nothing = made.layout.pieces(0), pieces_of_units(made, [])[0]
    for queries, keys in ((own, nothing), (nothing, own), (nothing, nothing)):
        for causal in (True, False):
            tiles = tile(queries, keys, Documents.of([9], causal=causal))
            assert not tiles.used.size
            assert calls(tiles.full) == calls(tiles.causal) == []


@pytest.mark.parametrize(
    ("queries", "keys"), [(runs((5, 3, 1)), runs((2, 9, 1))), (runs((6, 2, 2)), runs((1, 5, 2)))]
)
def test_queries_that_begin_inside_a_key_piece_are_refused(queries, keys):
    with pytest.raises(PlanError, match="begins inside a key piece; cut the key piece there"):
        pair_table(queries, keys, Documents.of([99]))


RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), max_size=12)


@SEEDED
@given(RANGES)
def test_rounds_never_overlap_and_are_as_few_as_the_deepest_point(items):
    low, count = np.array(items, dtype=np.int64).reshape(-1, 2).T
    number = rounds(low, count)
    taken = Counter(
        (int(r), x) for r, a, n in zip(number, low, count, strict=True) for x in range(a, a + n)
    )
    assert not taken or max(taken.values()) == 1
    depth = Counter(x for _, x in taken)
    assert (int(number.max()) + 1 if len(items) else 0) == max(depth.values(), default=0)


@pytest.mark.parametrize(
    ("low", "count", "expected"),
    [
        ([], [], []),
        ([0, 4, 8], [4, 4, 4], [0, 0, 0]),
        ([8, 0, 4], [1, 4, 4], [0, 0, 0]),
        ([0, 0, 0], [2, 2, 2], [0, 1, 2]),
        ([0, 1, 3], [3, 4, 2], [0, 1, 0]),
    ],
)
def test_rounds_by_hand(low, count, expected):
    assert rounds(np.array(low, np.int64), np.array(count, np.int64)).tolist() == expected
