"""Layouts: every token on one rank, even counts and work, and index maps that stay small."""

import itertools
import math
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spread import spread

import tasp_core as tasp
from tasp_core import Documents, LayoutError, check, plan
from tasp_core.sequence.layouts import Layout, ranges

SEEDED = settings(derandomize=True, deadline=None, max_examples=200, database=None)
NAMES = sorted(tasp.layouts())
ROWS = st.lists(st.integers(0, 20), max_size=6)


def cut_into_documents(total):
    """Documents of a row of `total` tokens: empty, one-token and longer ones, seeded."""
    dice, lengths, left = random.Random(total), [0], total
    while left:
        lengths.append(min(left, dice.choice([0, 1, 1, 2, 5, 11, 40])))
        left -= lengths[-1]
    return Documents.of(lengths)


@pytest.mark.parametrize(
    ("name", "packed"), spread(itertools.product(NAMES, (True, False)), keep=len(NAMES))
)
def test_shard_then_unshard_is_the_identity(name, packed):
    """CASES L6, for T = 1..64 and P = 1..8, by index maps alone."""
    for total in range(1, 65):
        docs = cut_into_documents(total) if packed else Documents.of([total])
        row = np.random.default_rng(total).permutation(total)
        for ranks in range(1, 9):
            layout = Layout(name, docs, ranks)
            tokens = [layout.tokens(r) for r in range(ranks)]
            again = np.full(total, -1)
            for mine in tokens:
                again[mine] = row[mine]
            assert (again == row).all(), (total, ranks)
            assert sum(map(len, tokens)) == total, (total, ranks)
            assert layout.counts.tolist() == [len(t) for t in tokens]


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_keeps_the_row_as_it_is(name):
    for docs in (Documents.of([9]), Documents.of([3, 0, 1, 8])):
        assert Layout(name, docs, 1).tokens(0).tolist() == list(range(docs.total))


@pytest.mark.parametrize(("name", "most"), [("contiguous", 1), ("striped", 1), ("zigzag", 2)])
def test_counts_are_even(name, most):
    for total in [*range(65), 1001, 32_769]:
        for ranks in range(1, 9):
            counts = Layout(name, cut_into_documents(total), ranks).counts
            assert counts.max() - counts.min() <= most, (total, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("layout", ["zigzag", "per_document"])
def test_zigzag_work_is_even_on_one_document(ranks, layout):
    """Over ranks within 1 % from T = 128 P; a step's shares there are few tokens, so rounding shows."""
    for extra in sorted({0, 1, ranks - 1, ranks, ranks + 2, 2 * ranks - 1, 101}):
        report = check(plan([128 * ranks + extra], ranks, schedule="tasp", layout=layout))
        assert report.balance <= 1.01, extra
        assert report.step_balance <= 1.06, extra
        large = check(plan([1024 * ranks + extra], ranks, schedule="tasp", layout=layout))
        assert large.step_balance <= 1.01, extra


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 12, 16])
@pytest.mark.parametrize("schedule", ["tasp", "ring", "wave"])
def test_zigzag_work_is_equal_in_every_step_where_shares_are(ranks, schedule):
    """THEORY 4.1: blocks that divide by the shares give every rank the same work in every step."""
    shares = len(tasp.decompose(ranks)) * (ranks - 1)
    report = check(plan([2 * ranks * shares], ranks, schedule=schedule, layout="zigzag"))
    assert report.balance == 1
    assert report.step_balance == 1


def test_contiguous_work_is_not_even():
    report = check(plan([1024], 8, layout="contiguous"))
    assert 1.8 < report.balance < 1.9  # (2P - 1) / P


@pytest.mark.parametrize("length", [1, 17])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_per_document_work_is_even_on_many_short_documents(length, ranks):
    """What 2P does not divide must not always fall to the same rank."""
    report = check(plan([length] * 64, ranks, layout="per_document"))
    counts = plan([length] * 64, ranks, layout="per_document").layout.counts
    assert counts.max() <= math.ceil(length * 64 / ranks) + 1
    assert report.balance <= (1.0 if 64 % (2 * ranks) == 0 else 1.1)


@SEEDED
@given(ROWS, st.sampled_from(NAMES), st.integers(1, 8))
def test_locate_inverts_tokens(lengths, name, ranks):
    layout = Layout(name, Documents.of(lengths), ranks)
    for rank in range(ranks):
        tokens = layout.tokens(rank)
        at, index = layout.locate(tokens)
        assert at.tolist() == [rank] * len(tokens)
        assert index.tolist() == list(range(len(tokens)))
        assert layout.num_tokens(rank) == len(tokens)


@SEEDED
@given(ROWS, st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 5), st.booleans())
def test_pieces_partition_and_lie_inside_one_document(lengths, name, ranks, shares, cut):
    docs = Documents.of(lengths)
    layout = Layout(name, docs, ranks)
    for rank in range(ranks):
        tokens = layout.tokens(rank)
        cuts = np.unique(layout.share_cuts(rank, shares)) if cut else None
        pieces = layout.pieces(rank, cuts)
        assert (pieces.count > 0).all()
        assert pieces.offset.tolist() == [0, *np.cumsum(pieces.count)[:-1]][: len(pieces.count)]
        assert pieces.count.sum() == len(tokens)
        for offset, count, start, stride, doc in zip(*pieces, strict=True):
            run = tokens[offset : offset + count]
            assert run.tolist() == [start + i * stride for i in range(count)]
            assert docs.cu_seqlens[doc] <= run[0]
            assert run[-1] < docs.cu_seqlens[doc + 1]
            assert cuts is None or not ((cuts > offset) & (cuts < offset + count)).any()
        assert pieces.last.tolist() == tokens[pieces.offset + pieces.count - 1].tolist()


@SEEDED
@given(ROWS, st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 9))
def test_share_cuts_partition_every_block(lengths, name, ranks, shares):
    layout = Layout(name, Documents.of(lengths), ranks)
    for rank in range(ranks):
        cuts = layout.share_cuts(rank, shares)
        blocks = layout.shard(rank).blocks
        assert cuts.shape == (len(blocks) - 1, shares + 1)
        assert (cuts[:, 0] == blocks[:-1]).all()
        assert (cuts[:, -1] == blocks[1:]).all()
        sizes = np.diff(cuts, axis=1)
        assert (sizes >= 0).all()
        assert (sizes.max(axis=1) - sizes.min(axis=1) <= 1).all()
        assert sizes.sum() == layout.num_tokens(rank)


def test_zigzag_blocks_are_the_front_and_the_back():
    layout = Layout("zigzag", Documents.of([16]), 4)
    assert [layout.tokens(r).tolist() for r in range(4)] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]
    assert layout.share_cuts(0, 2).tolist() == [[0, 1, 2], [2, 3, 4]]
    assert layout.shard(3).segments.tolist() == [[6, 10, 1]]  # adjacent blocks are one segment
    assert layout.shard(3).blocks.tolist() == [0, 2, 4]
    assert Layout("striped", Documents.of([9]), 4).tokens(1).tolist() == [1, 5]
    packed = Layout("per_document", Documents.of([4, 8]), 2)
    assert packed.tokens(0).tolist() == [0, 4, 5, 3, 10, 11]
    assert packed.shard(0).blocks.tolist() == [0, 3, 6]


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_tokens_and_ranks_without_tokens(name):
    """CASES L11, L13: nothing to hold is held without error."""
    for lengths in ([], [0], [0, 0], [1], [0, 1, 0, 1], [3]):
        layout = Layout(name, Documents.of(lengths), 8)
        held = np.concatenate([layout.tokens(r) for r in range(8)])
        assert sorted(held.tolist()) == list(range(sum(lengths)))
        assert layout.locate(np.zeros(0, dtype=np.int64))[0].size == 0


@pytest.mark.parametrize("layout", NAMES)
def test_index_maps_of_4m_tokens_are_small(layout):
    """CASES N11: T = 4M on 8 ranks; nothing of T (let alone T x H x D) numbers is made."""
    tracemalloc.start()
    try:
        made = plan([4 << 20], 8, schedule="tasp", layout=layout)
        hops = made.hops()
        pieces = [made.layout.pieces(r) for r in range(8)]
        units = made.subchunks
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5e6  # an index of every token takes 32 MB
    assert len(hops.step) == 8 * 7 * 7
    assert sum(int(p.count.sum()) for p in pieces) == int(units.count.sum()) == 4 << 20
    # the byte offset of a token of 64 heads of 128 needs more than 32 bits
    row_bytes = 64 * 128 * 2
    top = max(int(p.last.max()) for p in pieces)
    assert top == (4 << 20) - 1
    for p in pieces:
        assert {column.dtype for column in p} == {np.dtype(np.int64)}
        assert (p.last * row_bytes >= 0).all()
        assert int((p.last * row_bytes).max()) == int(p.last.max()) * row_bytes


def test_token_maps_of_4m_tokens_are_int64():
    for name in NAMES:
        layout = Layout(name, Documents.of([4 << 20]), 64)
        for rank in (0, 63):
            tokens = layout.tokens(rank)
            assert tokens.dtype == np.int64
            assert len(tokens) == (4 << 20) // 64
            last = tokens[-1:]
            assert (layout.locate(last)[0] == rank).all()
            assert int((last * (64 * 128))[0]) == int(tokens[-1]) * 64 * 128


def test_huge_strides():
    ranks = 1 << 20
    layout = Layout("striped", Documents.of([4 << 20]), ranks)
    assert layout.tokens(ranks - 1).tolist() == [ranks * i + ranks - 1 for i in range(4)]
    pieces = layout.pieces(ranks - 1)
    assert (pieces.stride.tolist(), pieces.last.tolist()) == ([ranks], [(4 << 20) - 1])
    far = Layout("zigzag", Documents.of([1 << 40]), 8).pieces(0)
    assert far.last.tolist() == [(1 << 36) - 1, (1 << 40) - 1]


def test_ranges_lists_integers():
    numbers, owner = ranges(np.array([3, 5, 0]), np.array([5, 4, 2]))
    assert numbers.tolist() == [3, 4, 0, 1]
    assert owner.tolist() == [0, 0, 2, 2]


def test_unknown_names():
    with pytest.raises(LayoutError, match=r"no layout 'spiral'; known are .*zigzag"):
        Layout("spiral", Documents.of([4]), 2)
    with pytest.raises(LayoutError, match="no layout ''"):
        plan([4], 2, layout="")


@pytest.mark.parametrize("ranks", [0, -1, 2.5])
def test_bad_numbers_of_ranks(ranks):
    with pytest.raises(LayoutError, match="ranks must be a whole number >= 1, got"):
        Layout("zigzag", Documents.of([4]), ranks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [-1, 4, 99])
def test_ranks_that_do_not_exist(name, rank):
    layout = Layout(name, Documents.of([40]), 4)
    for ask in (layout.shard, layout.tokens, layout.pieces, layout.num_tokens):
        with pytest.raises(LayoutError, match=rf"rank {rank} does not exist: ranks are 0\.\.3"):
            ask(rank)


def test_whole_floats_count_ranks_or_are_refused():
    try:
        layout = Layout("zigzag", Documents.of([40]), 4.0)
    except LayoutError:
        return
    assert layout.counts.tolist() == [10] * 4


def test_tokens_and_positions_are_the_layouts():
    made = plan([3, 5], 2, layout="zigzag")
    assert [made.tokens(r).tolist() for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [made.positions(r).tolist() for r in (0, 1)] == [[0, 1, 3, 4], [2, 0, 1, 2]]
    assert (made.num_tokens(1), made.ranks) == (4, 2)
