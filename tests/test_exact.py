"""Exactness on real ranks: schedule x layout x mask x P x documents x heads against float64.

A sampled matrix here, all of it with `pytest -m full`; windows in test_window.py. A case passes when
out, lse, dq, dk and dv are within twice the plain single-device kernel's own error against float64,
or within 8 roundings of the largest value where documents are so short that the kernel's own error
is a few roundings.
The largest error of a short row is a matter of luck, so the kernel's own is the worst of four rows.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

import tasp_core as tasp
from tasp_core.kernels.aten import AtenCpu
from tasp_core.kernels.reference import oracle
from tasp_core.lab.bench.accuracy import NAMES, Inputs, Reference, run_rank

DOCUMENTS = ((300,), (137, 2041, 89), (0, 137, 0, 1, 62), (1,) * 40, (7, 3))
HEADS = ((4, 4), (8, 2), (6, 1))
HEAD_DIM = 16
EACH = 3  # rows and heads a plan
BATCH = 120  # cases a launch


class Case(NamedTuple):
    ranks: int
    schedule: str
    machine: str | None
    layout: str
    causal: bool
    documents: tuple[int, ...]
    heads: tuple[int, int]
    window: int | None = None

    @property
    def docs(self) -> tasp.Documents:
        return tasp.Documents.of(self.documents, causal=self.causal, window=self.window)

    def plan(self) -> tasp.Plan:
        return tasp.plan(
            self.docs, self.ranks, schedule=self.schedule, layout=self.layout, machine=self.machine
        )


def matrix(ranks: int) -> list[Case]:
    """Every supported plan at this P, also over two or more nodes; documents and heads take turns.

    Each plan runs with EACH rows and heads of the 15; over all plans every pair occurs.
    """
    machines = [None, *[f"mesh{m}x{ranks // m}" for m in range(1, ranks) if ranks % m == 0][-1:]]
    keys = itertools.product(tasp.schedules(), machines, tasp.layouts(), (True, False))
    plans = [
        k
        for k in keys
        if tasp.supports([9], ranks, schedule=k[0], machine=k[1], layout=k[2])
        and (k[1] is None or k[0] not in ("ring", "tasp", "all_gather"))  # nodes change nothing
    ]
    turns = itertools.product(enumerate(plans), range(EACH))
    return [
        Case(ranks, *key, DOCUMENTS[(i + 2 * j) % len(DOCUMENTS)], HEADS[(i // 5 + j) % len(HEADS)])
        for (i, key), j in turns
    ]


@cache
def prepared(docs: tasp.Documents, heads: tuple[int, int]):
    seeds = [docs.total + heads[0] + 1000 * i for i in range(4 if docs.total < 500 else 1)]
    rows = [Inputs.random(docs.total, *heads, HEAD_DIM, seed=s) for s in seeds]
    judges = [Reference(inputs, docs) for inputs in rows]
    limits = {n: max(judge.limits[n] for judge in judges) for n in NAMES}
    return rows[0], judges[0], limits


def local_errors(rank, group, cases):
    """This rank's largest error of each result of each case."""
    found = []
    for case in cases:
        inputs, judge, _ = prepared(case.docs, case.heads)
        p = case.plan()
        results, _ = run_rank(rank, group if case.ranks > 1 else None, p, inputs)
        row = []
        for name, mine in zip(NAMES, results, strict=True):
            gap = mine.double() - tasp.shard(judge.exact[name], p, rank)
            row.append(float(gap.abs().max()) if gap.numel() else 0.0)
        found.append(row)
    return found


def failures(cases: list[Case]) -> list[str]:
    for case in cases:  # before the fork, so that ranks share them
        prepared(case.docs, case.heads)
    by_rank = tasp.launch(local_errors, cases[0].ranks, cases, timeout_s=280)
    bad = []
    for i, case in enumerate(cases):
        worst = dict(zip(NAMES, np.max([r[i] for r in by_rank], axis=0), strict=True))  # keeps NaN
        _, _, limits = prepared(case.docs, case.heads)
        bad += [
            f"{case}: {n} {worst[n]:.2e} > {limits[n]:.2e}"
            for n in NAMES
            if not worst[n] <= limits[n]
        ]
    return bad


@cache
def samples() -> dict[int, list[Case]]:
    """By number of ranks: random cases of the eight schedules that came up least often before.

    Long documents are cut: the reference takes most of the time. `test_full_matrix` has them whole, and
    L4 in test_cases_lengths.py.
    """
    uses: Counter[str] = Counter()
    found = {}
    for ranks in range(1, 9):
        cases = matrix(ranks)
        random.Random(ranks).shuffle(cases)
        by_schedule = {case.schedule: case for case in cases}
        names = sorted(by_schedule, key=lambda name: uses[name])[:8]
        uses.update(names)
        found[ranks] = [
            case._replace(documents=tuple(min(n, 641) for n in case.documents))
            for case in map(by_schedule.__getitem__, names)
        ]
    return found


def test_every_schedule_is_sampled_on_several_ranks():
    names = [case.schedule for ranks, cases in samples().items() if ranks > 1 for case in cases]
    assert min(map(names.count, tasp.schedules())) >= 2


@pytest.mark.parametrize("ranks", range(1, 9))
def test_sampled_matrix(ranks):
    cases = list(samples()[ranks])
    cases += [c._replace(window=w) for c, w in zip(cases, (2, 33, 100), strict=False)]
    assert failures(cases) == []


FULL = [(p, i) for p in range(1, 9) for i in range(-(-len(matrix(p)) // BATCH))]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "part"), FULL)
def test_full_matrix(ranks, part):
    assert failures(matrix(ranks)[part * BATCH : (part + 1) * BATCH]) == []


def test_the_judge_rejects_a_wrong_result():
    inputs, judge, _ = prepared(tasp.Documents.of([300]), (4, 4))
    p = tasp.plan([300], 1)
    pieces, _ = run_rank(0, None, p, inputs)
    assert judge.errors([pieces], p).ok
    for i in range(5):
        wrong = [x.clone() for x in pieces]
        wrong[i].view(-1)[17] += 1e-4
        assert not judge.errors([wrong], p).ok
        wrong[i].view(-1)[17] = float("nan")
        assert not judge.errors([wrong], p).ok


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("layout", ["zigzag", "striped", "per_document"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_rank_is_the_plain_kernel_bit_for_bit(documents, layout, dtype):
    docs = tasp.Documents.of(documents)
    inputs = Inputs.random(docs.total, 4, 2, HEAD_DIM, dtype=dtype)
    ours, _ = run_rank(0, None, tasp.plan(docs, 1, layout=layout), inputs)
    q, k, v, dout = inputs.tensors()
    plain = oracle(q, k, v, docs, dout=dout, kernel=AtenCpu())
    for name, mine in zip(NAMES, ours, strict=True):
        assert torch.equal(mine, plain[name]), name


def results_of(rank, group, plans, inputs):
    return [run_rank(rank, group, p, inputs)[0] for p in plans]


def test_two_runs_give_the_same_bits():
    docs = tasp.Documents.of([137, 641, 89])
    plans = [
        tasp.plan(docs, 4, schedule=s, layout=lay, machine=m)
        for s, m in (("ring", None), ("tasp", None), ("all_gather", None), ("wave", "mesh2x2"))
        for lay in ("zigzag", "striped")
    ]
    inputs = Inputs.random(docs.total, 4, 2, HEAD_DIM)
    first, second = (tasp.launch(results_of, 4, plans, inputs) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a, b, strict=True):
            assert all(map(torch.equal, x, y))


def test_n1_bf16_error_does_not_grow_with_ranks():
    docs = tasp.Documents.of([137, 1700, 211])
    inputs = Inputs.random(docs.total, 4, 2, 32, dtype=torch.bfloat16)
    judge, base = Reference(inputs, docs), {}
    for ranks in (1, 2, 4, 8):
        schedules = ("ring", "tasp", "wave") if ranks > 1 else ("ring",)  # alone, all are the same
        plans = [tasp.plan(docs, ranks, schedule=schedule) for schedule in schedules]
        by_rank = tasp.launch(results_of, ranks, plans, inputs)
        for i, p in enumerate(plans):
            errors = judge.errors([pieces[i] for pieces in by_rank], p).ours
            base = base or errors
            for name in ("out", "dq", "dk", "dv"):
                assert errors[name] <= 1.1 * base[name], (p.summary(), name, errors, base)
