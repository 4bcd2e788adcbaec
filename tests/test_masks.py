"""Masks: slices against brute force, through plans on real ranks against float64, refused by name."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
import re

import numpy as np
import pytest
import torch

import tasp_core as tasp
from tasp_core import Documents, Plan, PlanError, check, plan
from tasp_core.kernels.aten import AtenCpu
from tasp_core.kernels.reference import Math, oracle
from tasp_core.lab.bench.accuracy import NAMES, Inputs, Reference, run_rank
from tasp_core.sequence.masks import KINDS, Mask, Slice
from tasp_core.sequence.pieces import Pieces
from tests.interpreter import interpret
from tests.spread import spread

LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "balanced")


def brute(slices, total):
    """How many slices show each key to each query, int64 [total, total], pair by pair."""
    seen = np.zeros((total, total), dtype=np.int64)
    for q_start, q_stop, k_start, k_stop, *kind in slices:
        rows, columns = q_stop - q_start, k_stop - k_start
        name, *band = kind or ["full"]
        for a in range(rows):
            for b in range(columns):
                seen[q_start + a, k_start + b] += {
                    "full": True,
                    "causal": rows - 1 - a <= columns - 1 - b,  # from the bottom right corner
                    "inverse_causal": b >= a,  # from the top left one
                    "band": not band or band[0] <= b - a <= band[1],
                }[name]
    return seen


def random_slices(dice, total, tries=8):
    """A few slices that do not overlap, of all kinds, some of them empty."""
    chosen, seen = [], np.zeros((total, total), dtype=np.int64)
    for _ in range(tries):
        ends = [sorted(dice.choices(range(total + 1), k=2)) for _ in range(2)]
        kind = dice.choice(KINDS)
        band = sorted(dice.choices(range(-total, total + 1), k=2)) if kind == "band" else []
        one = (*ends[0], *ends[1], kind, *band)
        more = brute([one], total)
        if (seen + more).max() <= 1:
            chosen.append(one)
            seen += more
    return chosen, seen.astype(bool)


@pytest.mark.parametrize("seed", range(150))
def test_a_mask_is_its_slices_pair_by_pair(seed):
    dice = random.Random(seed)
    total = dice.randint(1, 14)
    slices, seen = random_slices(dice, total)
    mask, tokens = Mask.of(slices, total), np.arange(total)
    assert np.array_equal(mask.dense(tokens, tokens), seen)
    assert mask.num_pairs == seen.sum()
    assert mask.causal == (not np.triu(seen, 1).any())
    some = np.array(dice.choices(range(total), k=5))
    assert np.array_equal(mask.dense(some, some[::-1]), seen[np.ix_(some, some[::-1])])
    again = Mask.of(mask.slices, total)
    assert again == mask
    assert hash(again) == hash(mask)
    assert brute([one.as_list() for one in mask.slices], total).max(initial=0) <= 1
    runs = np.zeros_like(seen)
    for query, first, stop in zip(*(x.tolist() for x in mask.runs(tokens)), strict=True):
        assert first < stop
        runs[query, first:stop] = True
    assert np.array_equal(runs, seen)


@pytest.mark.parametrize("seed", range(60))
def test_bands_of_pieces_are_the_visible_pairs(seed):
    """Runs and stripes of the packed sequence as queries and keys, in any order."""
    dice = random.Random(seed)
    total, stride = dice.randint(2, 14), dice.choice([1, 2, 3])
    slices, seen = random_slices(dice, total)
    pieces = []
    for lane in range(stride):
        tokens, at = list(range(lane, total, stride)), 0
        while at < len(tokens):
            count = dice.randint(1, len(tokens) - at)
            pieces.append((0, count, tokens[at], stride, 0))
            at += count
    dice.shuffle(pieces)
    keys = Pieces(*np.array(pieces).T)
    queries = Pieces(*np.array(dice.sample(pieces, dice.randint(1, len(pieces)))).T)
    shown = np.zeros_like(seen, dtype=np.int64)
    bands = Mask.of(slices, total).bands(queries, keys)
    for q, k, q_first, rows, k_first, columns, low, high, area in zip(
        *(x.tolist() for x in bands), strict=True
    ):
        before = shown.sum()
        for a in range(rows):
            for b in range(max(0, a + low), min(columns, a + high + 1)):
                query = queries.start[q] + (q_first + a) * stride
                shown[query, keys.start[k] + (k_first + b) * stride] += 1
        assert shown.sum() - before == area > 0
    mine = np.zeros(total, dtype=bool)
    for start, count in zip(queries.start, queries.count, strict=True):
        mine[start : start + count * stride : stride] = True
    assert np.array_equal(shown, seen & mine[:, None])


@pytest.mark.parametrize(
    "docs",
    [
        Documents.of([5, 0, 3, 1]),
        Documents.of([5, 0, 3, 1], causal=False),
        Documents.of([5, 0, 7], window=3),
        Documents.of([5, 0, 7], causal=False, window=3),
        Documents.of([]),
    ],
)
def test_documents_are_masks_too(docs):
    tokens = np.arange(docs.total)
    ahead = tokens[None, :] - tokens[:, None]
    seen = docs.document_of(tokens)[:, None] == docs.document_of(tokens)[None, :]
    seen &= (ahead <= 0) | (not docs.causal)
    seen &= abs(ahead) < (docs.window or docs.total + 1)
    assert np.array_equal(docs.mask.dense(tokens, tokens), seen)
    assert docs.mask == Mask.of(docs.mask.slices, docs.total)
    assert len(docs.mask) == np.count_nonzero(docs.lengths)
    assert docs.num_pairs == seen.sum()
    again = Documents.masked(docs.lengths, docs.mask.slices)
    assert again.mask == docs.mask
    assert again.causal == (docs.causal or not docs.total)
    assert again != docs  # planned in another way


def test_kinds_are_the_first_that_says_it():
    slices = [(0, 3, 0, 5, "band", -9, 9), (3, 5, 0, 3, "band", -1, 1), (5, 8, 0, 2, "band", 0, 5)]
    slices += [(8, 9, 2, 7, "causal"), (9, 11, 0, 4, "band", 1, 2)]
    kinds = [one.kind for one in Mask.of(slices, 12).slices]
    assert kinds == ["full", "causal", "inverse_causal", "full", "band"]
    assert str(Slice(0, 2, 0, 4, "band", 1, 2)) == "queries [0, 2) x keys [0, 4), BAND(1, 2)"


@pytest.mark.parametrize(
    ("slices", "reason"),
    [
        (
            [(0, 4, 0, 4), (2, 6, 3, 8)],
            r"slice 0 \(queries \[0, 4\) x keys \[0, 4\), FULL\) and slice 1 "
            r"\(queries \[2, 6\) x keys \[3, 8\), FULL\) both show key 3 to query 2",
        ),
        (
            [(6, 8, 0, 8), (0, 8, 0, 8, "causal")],
            r"slice 0 \(.*FULL\) and slice 1 \(.*CAUSAL\) both show key",
        ),
        (
            [(0, 9, 0, 4)],
            r"slice 0 .*queries \[0, 9\).* has queries outside the packed sequence: .*0\.\.8",
        ),
        ([(0, 4, 0, 4), (4, 8, 4, 9)], r"slice 1 .*keys \[4, 9\).* has keys outside"),
        ([(4, 2, 0, 4)], "has queries outside .*must not end before they begin"),
        ([(-1, 2, 0, 4)], "an end of slice 0 of the mask must be a whole number >= 0, got -1"),
        ([(0, 2.5, 0, 4)], "an end of slice 0 of the mask must be a whole number >= 0, got 2.5"),
        ([(0, 4, 0, True)], "an end of slice 0 .*got True"),
        ([(0, 4, 0)], r"slice 0 of the mask must be \(q_start, .*got \(0, 4, 0\)"),
        ([5], "slice 0 of the mask must be .*got 5"),
        (["0404"], "slice 0 of the mask must be .*got '0404'"),
        ([(0, 4, 0, 4, "causl")], "slice 0 of the mask must be one of full, .*got 'causl'"),
        ([(0, 4, 0, 4, "band")], "slice 0 of the mask has low None and high None: a band has both"),
        ([(0, 4, 0, 4, "band", 1)], "has low 1 and high None"),
        ([(0, 4, 0, 4, "full", 1, 2)], "the other kinds have neither"),
        ([(0, 4, 0, 4, "band", 0.5, 2)], "slice 0 of the mask: low must be a whole number"),
        ([(0, 4, 0, 4, "band", 1 << 70, 1 << 71)], "low and high must be at most"),
    ],
)
def test_wrong_slices_are_refused_by_name(slices, reason):
    with pytest.raises(PlanError, match=reason):
        Documents.masked([3, 5], slices)


def test_triangles_of_one_rectangle_do_not_overlap():
    both = [(0, 4, 0, 4, "causal"), (0, 4, 0, 4, "band", 1, 4)]
    assert Documents.masked([4], both).num_pairs == 16
    with pytest.raises(PlanError, match="both show key 0 to query 0"):
        Documents.masked([4], [both[0], (0, 4, 0, 4, "inverse_causal")])


def test_many_slices_are_compared_in_parts(monkeypatch):
    blocks = [(8 * i, 8 * i + 8, 8 * j, 8 * j + 8) for i in range(40) for j in range(40)]
    monkeypatch.setattr("tasp_core.sequence.masks.PAIRS_AT_ONCE", 100)
    assert Documents.masked([320], blocks).num_pairs == 320 * 320
    with pytest.raises(
        PlanError, match=r"slice 1599 .* and slice 1600 .*both show key 319 to query 319"
    ):
        Documents.masked([320], [*blocks, (319, 320, 319, 320)])


# --- through plans --------------------------------------------------------------------------------


def prefix_lm():
    """Three documents that see their first tokens in full and the rest causally."""
    slices, start = [], 0
    for length, prefix in ((137, 40), (64, 64), (201, 1)):
        middle, stop = start + prefix, start + length
        slices += [(start, middle, start, middle), (middle, stop, start, stop, "causal")]
        start = stop
    return Documents.masked([137, 64, 201], slices)


def block_sparse():
    """Blocks of 32 tokens that see the first one, every third one, and a band around themselves."""
    slices, size, total = [], 32, 384
    for i in range(total // size):
        q = (size * i, size * i + size)
        low, high = max(0, q[0] - 20), min(total, q[1] + 7)
        slices += [(*q, low, high, "band", q[0] - low - 20, q[0] - low + 7)]
        slices += [(*q, j, j + size) for j in range(0, max(0, low - size), 3 * size)]
    return Documents.masked([total], slices)


def shared_prefix():
    """A prompt and three answers to it, which do not see each other."""
    lengths = [150, 70, 33, 90]
    cu = np.cumsum([0, *lengths]).tolist()
    slices = [(0, 150, 0, 150, "causal")]
    for start, stop in itertools.pairwise(cu[1:]):
        slices += [(start, stop, 0, 150), (start, stop, start, stop, "causal")]
    return Documents.masked(lengths, slices)


def with_blind_queries():
    """Queries that see nothing, keys that nobody sees, and rectangles higher than wide."""
    slices = [(10, 90, 0, 30, "causal"), (100, 140, 60, 170, "inverse_causal")]
    return Documents.masked([60, 130], [*slices, (150, 180, 10, 20), (10, 60, 120, 190, "causal")])


ROWS = {f.__name__: f() for f in (prefix_lm, block_sparse, shared_prefix, with_blind_queries)}
SCHEDULES = (("ring", None), ("tasp", None), ("wave", 2), ("all_gather", None), ("sap", None))
SCHEDULES += (("token_ring", None),)


def plans_of(docs, ranks):
    return [
        plan(
            docs, ranks, schedule=s, layout=layout, machine="mesh2x2" if n and ranks == 4 else None
        )
        for s, n in SCHEDULES
        for layout in LAYOUTS
        if s != "token_ring" or layout == "contiguous"
    ]


def results_of(rank, group, plans, inputs):
    group = group if plans[0].ranks > 1 else None
    return [run_rank(rank, group, p, inputs)[0] for p in plans]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 4) for name in ROWS), *spread(((name, 1) for name in ROWS), keep=1)],
)
def test_real_ranks_against_float64(name, ranks):
    docs = ROWS[name]
    inputs = Inputs.random(docs.total, 4, 2, 16)
    reference, plans = Reference(inputs, docs), plans_of(docs, ranks)
    by_rank = tasp.launch(results_of, ranks, plans, inputs, timeout_s=200)
    for i, p in enumerate(plans):
        assert check(p).pairs == docs.num_pairs
        assert reference.errors([r[i] for r in by_rank], p).ok, p.summary()


def dense_attention(inputs, docs):
    """out, lse, dq, dk, dv by autograd through a dense mask, float64; blind queries have a loss of 0."""
    q, k, v = (x.double().clone().requires_grad_() for x in inputs.tensors()[:3])
    tokens = np.arange(docs.total)
    seen = torch.from_numpy(brute([x.as_list() for x in docs.slices.slices], docs.total) > 0)
    assert np.array_equal(seen.numpy(), docs.mask.dense(tokens, tokens))
    k_all, v_all = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k_all) * q.shape[-1] ** -0.5
    sees = seen.any(1)
    hidden = ~seen & sees[:, None]  # a blind row keeps its scores: no NaN in its gradient
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1) * sees[:, None]
    out = torch.einsum("hqk,khe->qhe", weights, v_all)
    out.backward(inputs.dout.double())
    lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1).T
    return dict(zip(NAMES, (out, lse, q.grad, k.grad, v.grad), strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_the_oracle_is_dense_attention(name, monkeypatch):
    docs = ROWS[name]
    inputs = Inputs.random(docs.total, 4, 2, 8)
    exact = dense_attention(inputs, docs)
    monkeypatch.setattr(Math, "rows", 50)
    mine = oracle(*inputs.tensors()[:3], docs, dout=inputs.dout)
    for result in NAMES:
        torch.testing.assert_close(mine[result], exact[result].detach(), rtol=0, atol=1e-12)


def test_queries_that_see_nothing_give_zeros():
    docs = ROWS["with_blind_queries"]
    inputs = Inputs.random(docs.total, 4, 2, 8)
    tokens = np.arange(docs.total)
    blind = torch.from_numpy(~docs.mask.dense(tokens, tokens).any(1))
    assert 0 < blind.sum() < docs.total
    out, lse, dq, *_ = run_rank(0, None, plan(docs, 1), inputs)[0]
    for x in (out, dq):
        assert (x[blind] == 0).all()
        assert x.isfinite().all()
    assert (lse[blind] == -torch.inf).all()
    assert lse[~blind].isfinite().all()


@pytest.mark.parametrize("kernel", [AtenCpu(), Math(), Math(mask=Mask.of([(0, 2, 0, 2)], 343))])
def test_kernels_with_another_mask_are_refused(kernel):
    docs = ROWS["shared_prefix"]
    q = torch.zeros(docs.total, 1, 4)
    with pytest.raises(PlanError, match=r"another mask than these documents; use Math\(mask=docs"):
        oracle(q, q, q, docs, kernel=kernel)


@pytest.mark.parametrize(("name", "ranks"), spread(itertools.product(ROWS, (1, 3, 4)), keep=6))
def test_programs_compute_exactly_the_visible_pairs(name, ranks):
    docs = ROWS[name]
    tokens = np.arange(docs.total)
    seen = docs.mask.dense(tokens, tokens)
    for p in plans_of(docs, ranks)[:: 1 if ranks == 3 else 3]:
        for backward in (False, True):
            for r in interpret(p, backward=backward):
                own = len(r.tokens)
                assert np.array_equal(r.result[:own], seen[r.tokens]), p.summary()
                assert not backward or np.array_equal(r.grad[:own], seen.T[r.tokens]), p.summary()


def test_sap_moves_exactly_what_is_needed():
    for docs in ROWS.values():
        tokens = np.arange(docs.total)
        seen = docs.mask.dense(tokens, tokens)
        for layout in LAYOUTS:
            p = plan(docs, 4, schedule="sap", layout=layout)
            hops = p.hops()
            came = [set() for _ in range(4)]
            rows = zip(hops.dst, hops.owner, p.subchunk_of(hops, 0), strict=True)
            for dst, owner, at in rows:
                low = p.subchunks.low[at]
                came[dst] |= set(p.tokens(owner)[low : low + p.subchunks.count[at]].tolist())
            for rank, arrived in enumerate(came):
                mine = p.tokens(rank)
                assert arrived == set(np.flatnonzero(seen[mine].any(0))) - set(mine.tolist())


def test_sap_does_not_move_queries_of_slices():
    with pytest.raises(PlanError, match="move_q=True is for masks of documents, not for slices"):
        plan(ROWS["prefix_lm"], 4, schedule="sap", schedule_options={"move_q": True})


def test_a_mask_of_documents_as_slices_gives_their_results():
    docs = Documents.of([90, 0, 61])
    again = Documents.masked(docs.lengths, docs.mask.slices)
    inputs = Inputs.random(docs.total, 2, 2, 8)
    for layout in LAYOUTS:
        results = [
            tasp.launch(results_of, 2, [plan(d, 2, layout=layout)], inputs) for d in (docs, again)
        ]
        for rank in range(2):
            for mine, other in zip(results[0][rank][0], results[1][rank][0], strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)


# --- plans keep their slices ----------------------------------------------------------------------


def test_plans_keep_their_slices():
    docs = ROWS["block_sparse"]
    p = plan(docs, 4)
    assert f"a mask of {len(docs.slices)} slices" in p.summary()
    assert Plan.from_json(p.to_json()) == p
    assert Plan.from_json(p.to_json()).docs == docs
    assert pickle.loads(pickle.dumps(p)) == p
    assert pickle.loads(pickle.dumps(docs)) == docs
    assert copy.deepcopy(docs) == docs
    assert eval(repr(ROWS["with_blind_queries"])) == ROWS["with_blind_queries"]
    other = Documents.masked(docs.lengths, docs.slices.slices[:-1])
    assert other != docs
    assert plan(other, 4).fingerprint() != p.fingerprint()
    assert plan(Documents.of([docs.total]), 4).fingerprint() != p.fingerprint()


def test_plans_without_slices_have_no_such_key():
    assert "slices" not in json.loads(plan([8], 2).to_json())["documents"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"slices": None}, "documents.slices must be a list of slices, got None"),
        ({"slices": {}}, r"documents.slices must be a list of slices, got \{\}"),
        ({"slices": [[0, 4, 0, 4], 7]}, r"documents.slices\[1\] must be a list of .*got 7"),
        ({"slices": [[0, 4, 0, 4.0]]}, r"documents.slices\[0\] must be a list of whole numbers"),
        ({"slices": [[0, 4, 0, True]]}, r"documents.slices\[0\] must be a list of whole numbers"),
        ({"slices": [[0, 4, 0]]}, r"documents.slices: slice 0 of the mask must be \(q_start"),
        ({"slices": [[0, 4, 0, "4"]]}, "documents.slices: an end of slice 0"),
        ({"slices": [[0, 4, 0, 4, "spiral"]]}, "documents.slices: slice 0 .*got 'spiral'"),
        ({"slices": [[0, 9, 0, 4]]}, "documents.slices: slice 0 .*has queries outside"),
        (
            {"slices": [[0, 4, 0, 4], [3, 5, 2, 3]]},
            "documents.slices: .*slice 0 .* and slice 1 .*both",
        ),
        (
            {"slices": [[0, 4, 0, 4]], "causal": True},
            "documents: causal must be False, as the slices say",
        ),
        ({"window": 3}, "documents: documents with slices have no window, got 3"),
        ({"slice": []}, "it has a key 'documents.slice' that no plan has"),
    ],
)
def test_wrong_slices_of_a_plan_file_are_refused_by_name(change, reason):
    p = plan(Documents.masked([3, 5], [(0, 8, 0, 8, "band", 0, 3)]), 2)
    data = json.loads(p.to_json())
    assert data["documents"]["slices"] == [[0, 8, 0, 8, "band", 0, 3]]
    data["documents"] |= change
    with pytest.raises(PlanError, match=re.escape("not a plan: ") + reason):
        Plan.from_json(json.dumps(data))


def test_documents_refuse_what_contradicts_their_slices():
    mask = Mask.of([(0, 8, 0, 8, "causal")], 8)
    assert Documents([0, 8], slices=mask) == Documents.masked([8], mask.slices)
    for options, reason in (
        ({"causal": False}, "causal must be True, as the slices say"),
        ({"window": 3}, "documents with slices have no window"),
        ({"slices": [(0, 8, 0, 8)]}, r"slices must be a Mask; use Documents\.masked"),
    ):
        with pytest.raises(PlanError, match=reason):
            Documents([0, 8], **{"slices": mask, **options})
    with pytest.raises(PlanError, match="slices end behind the packed sequence's 7 tokens"):
        Documents([0, 7], slices=mask)
