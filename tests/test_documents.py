"""Documents: what a packed row may be, and how many pairs it shows, against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasp_core import Documents, PlanError

SEEDED = settings(derandomize=True, deadline=None, max_examples=300, database=None)
LENGTHS = st.lists(st.integers(0, 12), max_size=6)


@pytest.mark.parametrize(
    ("cu", "reason"),
    [
        ([0, 5, 3], "entry 2 is 3 after 5"),
        ([0, 2, 2, 1, 9], "entry 3 is 1 after 2"),
        ([1, 5], "must begin with 0, got 1"),
        ([-2, 0, 5], "must begin with 0, got -2"),
        ([0, 1.5, 3], "whole numbers"),
        ([0.0, 0.25], "whole numbers"),
        ([], "whole numbers"),
        ([[0, 3], [3, 5]], "1-D"),
        (7, "1-D"),
    ],
)
def test_bad_cu_seqlens(cu, reason):
    with pytest.raises(PlanError, match=reason):
        Documents.from_cu_seqlens(cu)


@pytest.mark.parametrize(
    ("total", "word"),
    [(8, "overruns the packed sequence: it ends at 10"), (12, "stops short of the packed")],
)
def test_cu_seqlens_must_end_with_the_row(total, word):
    with pytest.raises(PlanError, match=rf"{word}.*the sequence has {total} tokens"):
        Documents.from_cu_seqlens([0, 4, 10], total=total)
    assert Documents.from_cu_seqlens([0, 4, 10], total=10).total == 10


@pytest.mark.parametrize("cu", [["0", "x"], [0, None], [[0], [1, 2]], [0, float("nan")], None])
def test_cu_seqlens_that_are_no_numbers(cu):
    with pytest.raises(PlanError, match="whole numbers"):
        Documents.from_cu_seqlens(cu)


@pytest.mark.parametrize("lengths", [[-1], [3, -2, 4], [2.5], [3, 0.1]])
def test_bad_lengths(lengths):
    with pytest.raises(PlanError, match="document lengths must be whole numbers >= 0"):
        Documents.of(lengths)


@pytest.mark.parametrize("lengths", [[float("nan")], [float("inf")], ["x"], [None]])
def test_lengths_that_are_no_numbers(lengths):
    with pytest.raises(PlanError, match="document lengths must be whole numbers >= 0"):
        Documents.of(lengths)


@pytest.mark.parametrize("window", [0, -1, -128, 1.5])
@pytest.mark.parametrize("causal", [True, False])
def test_bad_windows(window, causal):
    with pytest.raises(PlanError, match=r"window must be a whole number >= 1.*got"):
        Documents.of([8], causal=causal, window=window)


def test_lengths_and_cu_seqlens_are_two_spellings():
    docs = Documents.of([5, 0, 7])
    for dtype in (np.int32, np.int64, np.uint64, np.float32):
        again = Documents.from_cu_seqlens(np.array([0, 5, 5, 12], dtype=dtype), total=12)
        assert again == docs
        assert hash(again) == hash(docs)
        assert again.cu_seqlens.dtype == np.int64
    assert Documents.of(x for x in (5, 0, 7)) == docs
    assert docs.lengths.tolist() == [5, 0, 7]
    assert docs.total == 12


@pytest.mark.parametrize(
    "other",
    [
        Documents.of([5, 7], causal=False),
        Documents.of([5, 7], window=3),
        Documents.of([7, 5]),
        Documents.of([12]),
        Documents.of([]),
    ],
)
def test_different_rows_differ(other):
    assert Documents.of([5, 7]) != other
    assert Documents.of([5, 7]) != [5, 7]


def brute_pairs(lengths, causal, window):
    """Visible pairs counted one by one over the whole row."""
    doc = [d for d, length in enumerate(lengths) for _ in range(length)]
    reach = len(doc) if window is None else window
    return sum(
        doc[q] == doc[k] and abs(q - k) < reach and (k <= q or not causal)
        for q in range(len(doc))
        for k in range(len(doc))
    )


@SEEDED
@given(LENGTHS, st.booleans(), st.none() | st.integers(1, 15))
def test_num_pairs_against_brute_force(lengths, causal, window):
    docs = Documents.of(lengths, causal=causal, window=window)
    assert docs.num_pairs == brute_pairs(lengths, causal, window)


def test_a_window_of_one_sees_itself():
    for causal in (True, False):
        assert Documents.of([7, 1, 0, 4], causal=causal, window=1).num_pairs == 12


def test_num_pairs_of_long_rows():
    assert Documents.of([4_000_000]).num_pairs == 4_000_000 * 4_000_001 // 2
    assert Documents.of([10**6] * 4, causal=False).num_pairs == 4 * 10**12


def test_num_pairs_beyond_int64():
    assert Documents.of([2**33]).num_pairs == 2**33 * (2**33 + 1) // 2


@SEEDED
@given(LENGTHS)
def test_positions_and_documents_of_tokens(lengths):
    docs = Documents.of(lengths)
    expected = [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    tokens = np.arange(docs.total)
    assert docs.document_of(tokens).tolist() == [d for d, _ in expected]
    assert docs.positions().tolist() == [i for _, i in expected]
    assert docs.positions(tokens[::-2]).tolist() == [i for _, i in expected[::-2]]
    assert docs.positions().dtype == np.int64


@pytest.mark.parametrize(
    ("lengths", "pairs"), [([], 0), ([0], 0), ([0, 0, 0], 0), ([0, 1, 0, 1], 2), ([1] * 9, 9)]
)
def test_empty_and_one_token_documents(lengths, pairs):
    docs = Documents.of(lengths)
    assert docs.total == sum(lengths)
    assert docs.lengths.tolist() == lengths
    assert docs.positions().tolist() == [0] * sum(lengths)
    assert docs.num_pairs == pairs
    assert Documents.of(lengths, causal=False).num_pairs == pairs


def test_the_row_is_frozen_and_its_own():
    cu = np.array([0, 3, 9])
    docs = Documents.from_cu_seqlens(cu)
    cu[1] = 8
    assert docs.lengths.tolist() == [3, 6]
    with pytest.raises(ValueError, match="read-only"):
        docs.cu_seqlens[1] = 4


def test_repr_says_what_rebuilds_it():
    docs = Documents.of([5, 0, 7], causal=False, window=4)
    assert repr(docs) == "Documents.of([5, 0, 7], causal=False, window=4)"
    assert eval(repr(docs)) == docs
    assert "12 documents" in repr(Documents.of([1] * 12))


@pytest.mark.parametrize(
    ("causal", "window", "size"),
    [
        (True, 1, (0, 0)),
        (True, 65, (64, 0)),
        (False, 65, (64, 64)),
        (True, 299, (298, 0)),
        (True, 300, None),
        (False, 301, None),
        (False, None, None),
    ],
)
def test_window_size_is_flash_attns_or_none_where_nothing_is_hidden(causal, window, size):
    assert Documents.of([300, 0, 7], causal=causal, window=window).window_size == size
