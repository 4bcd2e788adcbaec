"""Unit 8, packed sequences: checks, and the plan whose hops are pruned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

import tasp_core as tasp
from tasp_core import Plan, PlanError
from tasp_core.kernels.reference import oracle
from tasp_core.lab.bench.accuracy import Inputs
from tasp_core.schedules import KV
from tasp_core.sequence.balanced import measure
from tasp_core.sequence.tiles import rank_areas

from .verdict import exercise, expect, recap

LENGTHS = (1600, 90, 60, 700, 550)
RANKS = 4
PACKED = (LENGTHS, (3, 0, 2, 1), (2000, 1000), (7, 7, 7, 7, 7))
WORK, TOKENS = 1.05, 1.1  # the most work and tokens that a rank may have, over the mean
NEAR = 1e-4

Pairs = set[tuple[int, int]]
Pieces = list[list[tuple[int, int, int]]]


def direct(layout: str = "contiguous", lengths: tuple[int, ...] = LENGTHS) -> Plan:
    """Every rank sends its KV directly to every other rank, in one step."""
    options = {"blocks": 1, "twins": 0}
    return tasp.plan(lengths, RANKS, schedule="wave", layout=layout, schedule_options=options)


def by_token(layout: str) -> Plan:
    """Only the KV of tokens that another rank needs is sent; there are no remote queries."""
    options = {"move_q": False}
    return tasp.plan(LENGTHS, RANKS, schedule="sap", layout=layout, schedule_options=options)


def pruned(plan: Plan, pairs: Pairs) -> Plan:
    """The plan with hops of KV and of its gradients between these (owner, reader) pairs only."""
    hops = plan.hops(backward=True)
    reader = np.where(hops.kind == KV, hops.dst, hops.src)  # gradients go in the other direction
    kept = [pair in pairs for pair in zip(hops.owner.tolist(), reader.tolist(), strict=True)]
    return plan.with_hops(hops.where(np.array(kept)).lines())


def needed(plan: Plan) -> Pairs:
    """The (owner, reader) pairs in which a query of the reader sees a key of the owner."""
    reader, owner = np.nonzero(rank_areas(plan.layout))
    return {(b, a) for a, b in zip(reader.tolist(), owner.tolist(), strict=True) if a != b}


def tokens_sent(plan: Plan) -> int:
    """Tokens whose KV is sent in the forward pass, counted once per hop."""
    return int(tasp.check(plan).tokens_sent.sum())


@exercise
def check_mask(answer: Callable[[list[int]], Any]) -> None:
    """The mask of a packed sequence, from its cumulative lengths."""
    for lengths in ((3,), (2, 2), (3, 0, 2, 1), (1, 4, 1)):
        docs = tasp.Documents.of(lengths)
        got = np.asarray(answer(docs.cu_seqlens.tolist()))
        t = docs.total
        expect(got.shape == (t, t), f"documents {lengths}: {t} x {t} entries, got {got.shape}")
        expect(got.dtype == bool, f"entries are True or False, got {got.dtype}")
        doc = docs.document_of(np.arange(t))
        right = (doc[:, None] == doc) & np.tri(t, dtype=bool)
        wrong = np.argwhere(got != right)
        if len(wrong):
            q, k = wrong[0].tolist()
            sees = "sees" if right[q, k] else "does not see"
            expect(False, f"documents {lengths}: token {q} {sees} token {k}")


@exercise
def check_needed(answer: Callable[[list[int], list[np.ndarray]], Pairs]) -> None:
    """The (owner, reader) pairs between which KV must be sent."""
    for layout in ("contiguous", "zigzag"):
        for lengths in (LENGTHS, (2000, 1000), (1500, 1500)):
            plan = direct(layout, lengths)
            tokens = [plan.tokens(r) for r in range(RANKS)]
            returned = answer(plan.docs.cu_seqlens.tolist(), tokens)
            pairs = all(isinstance(pair, tuple) for pair in returned)
            expect(pairs, "a set of pairs (owner, reader) is asked for, such as {(0, 1)}")
            got, where = set(returned), f"{layout}, documents {lengths}"
            expect(all(a != b for a, b in got), f"{where}: no rank sends KV to itself")
            missing, extra = sorted(needed(plan) - got), sorted(got - needed(plan))
            if missing:
                owner, reader = missing[0]
                try:
                    tasp.check(pruned(plan, got))
                except PlanError as error:
                    reason = str(error).splitlines()[0]
                    expect(False, f"{where}: without {owner} > {reader} the checker says: {reason}")
            hint = "no document has a query on the reader and an earlier key on the owner"
            expect(not extra, f"{where}: {extra[:1]} is not needed: {hint}")


def _pieces(answer: Pieces) -> list[np.ndarray]:
    expect(len(answer) == RANKS, f"return a list of pieces for each of {RANKS} ranks")
    for rank, pieces in enumerate(answer):
        for piece in pieces:
            valid = np.size(piece) == 3 and np.array_equal(piece, np.array(piece, dtype=np.int64))
            hint = "a piece is three integers (document, start, stop)"
            expect(valid, f"rank {rank}: {hint}, got {piece}")
    return [np.array(pieces, dtype=np.int64).reshape(-1, 3) for pieces in answer]


@exercise
def check_balance(answer: Callable[[list[int], int], Pieces]) -> None:
    """Pieces (document, start, stop) of every rank: each token once, even work and tokens."""
    for lengths in PACKED:
        pieces = _pieces(answer(list(lengths), RANKS))
        copies = np.zeros(sum(lengths), dtype=np.int64)  # of each token
        begin = np.cumsum((0, *lengths))
        for doc, start, stop in np.concatenate(pieces).tolist():
            there = 0 <= doc < len(lengths)
            expect(there, f"{lengths}: no document {doc}, there are {len(lengths)}, from 0")
            fits = 0 <= start <= stop <= lengths[doc]
            expect(fits, f"document {doc} has {lengths[doc]} tokens, no piece {start}..{stop}")
            copies[begin[doc] + start : begin[doc] + stop] += 1
        expect(
            (copies == 1).all(),
            f"{lengths}: {np.sum(copies != 1)} tokens are not on exactly one rank",
        )
        if sum(lengths) < 10 * RANKS:
            continue  # too few tokens to be even
        balance = measure(pieces, np.array(lengths))
        for name, got, most in (
            ("work", balance.work_max_mean, WORK),
            ("tokens", balance.tokens_max_mean, TOKENS),
        ):
            expect(
                got <= most,
                f"{lengths}: max/mean of {name} is {got:.3f}, at most {most} is allowed",
            )


def inputs(plan: Plan, seed: int = 8) -> Inputs:
    """q, k, v and the gradient of the output, for the complete sequence."""
    return Inputs.random(plan.docs.total, 4, 2, 16, seed=seed)


@exercise
def check_run(answer: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """A rank's output and dk, on real ranks, against float64 in one process."""
    plan = tasp.plan((160, 9, 6, 70, 55), RANKS, schedule="sap", layout="balanced")
    x = inputs(plan)
    by_rank = tasp.launch(answer, RANKS, plan, *x.tensors(), timeout_s=30)
    exact = oracle(x.q, x.k, x.v, plan.docs, dout=x.dout)
    for rank, returned in enumerate(by_rank):
        expect(len(returned) == 2, f"rank {rank} should return out and dk")
        for name, got in zip(("out", "dk"), returned, strict=True):
            right = tasp.shard(exact[name], plan, rank)
            expect(
                tuple(got.shape) == tuple(right.shape),
                f"rank {rank}: {name} has shape {tuple(got.shape)}, not {tuple(right.shape)}",
            )
            off = float((got.detach().double() - right).abs().max())
            hint = "are its rows in the order of plan.tokens(rank), and is dk of this dout?"
            expect(off < NEAR, f"rank {rank}: {name} is off by {off:.2g}: {hint}")


check_recap = recap(
    (9, "3 + 2 + 1 and 2 + 1"),
    (0, "no query of one rank sees a key of the other"),
    ("ring", "in which schedule does every rank forward every share?"),
    (2, "the degree divides the number of query heads and the number of ranks per node"),
    (60, "the later tokens see the earlier ones, but not the reverse"),
)
