"""Wrong answers to the exercises of unit 8."""

from __future__ import annotations

from typing import Any

import numpy as np

import tasp_core as tasp


def _documents(cu: list[int]) -> np.ndarray:
    return np.searchsorted(cu, np.arange(cu[-1]), side="right")


def _strict(cu: list[int]) -> np.ndarray:
    doc, t = _documents(cu), np.arange(cu[-1])
    return (doc[:, None] == doc) & (t[:, None] > t)


def _full(cu: list[int]) -> np.ndarray:
    doc = _documents(cu)
    return doc[:, None] == doc


def _common_document(cu: list[int], tokens: list[np.ndarray]) -> set[tuple[int, int]]:
    doc = [set(np.searchsorted(cu, t, side="right").tolist()) for t in tokens]
    n = range(len(tokens))
    return {(a, b) for a in n for b in n if a != b and doc[a] & doc[b]}


def _earlier(cu: list[int], tokens: list[np.ndarray]) -> set[tuple[int, int]]:
    n = range(len(tokens))
    return {(a, b) for a in n for b in n if a != b and tokens[a].min() < tokens[b].max()}


def _swapped(cu: list[int], tokens: list[np.ndarray]) -> set[tuple[int, int]]:
    doc = [np.searchsorted(cu, t, side="right") for t in tokens]
    n = range(len(tokens))

    def sees(b: int, a: int) -> bool:
        same = doc[b][:, None] == doc[a]
        return bool((same & (tokens[b][:, None] >= tokens[a])).any())

    return {(b, a) for a in n for b in n if a != b and sees(b, a)}


def _runs(lengths: list[int], ranks: int) -> list[list[tuple[int, int, int]]]:
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for doc, length in enumerate(lengths):
        cut = [length * i // ranks for i in range(ranks + 1)]
        for rank in range(ranks):
            pieces[rank].append((doc, cut[rank], cut[rank + 1]))
    return pieces


def _equal_work(lengths: list[int], ranks: int) -> list[list[tuple[int, int, int]]]:
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for doc, length in enumerate(lengths):
        cut = [round(length * (i / ranks) ** 0.5) for i in range(ranks + 1)]
        for rank in range(ranks):
            pieces[rank].append((doc, cut[rank], cut[rank + 1]))
    return pieces


def _complete_documents(lengths: list[int], ranks: int) -> list[list[tuple[int, int, int]]]:
    return [[(d, 0, n) for d, n in enumerate(lengths) if d % ranks == r] for r in range(ranks)]


def _halves_of_tokens(lengths: list[int], ranks: int) -> list[list[tuple[int, float, float]]]:
    cut = [i / (2 * ranks) for i in range(2 * ranks + 1)]
    return [
        [
            (d, n * cut[b], n * cut[b + 1])
            for d, n in enumerate(lengths)
            for b in (r, 2 * ranks - 1 - r)
        ]
        for r in range(ranks)
    ]


def _one_short(lengths: list[int], ranks: int) -> list[list[tuple[int, int, int]]]:
    pieces = _runs(lengths, ranks)
    return [[(d, a, max(a, b - 1)) for d, a, b in p] for p in pieces]


def _in_sequence_order(rank: int, group: Any, plan: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
    low = sum(plan.num_tokens(r) for r in range(rank))
    mine = slice(low, low + plan.num_tokens(rank))
    q, k, v, dout = (x[mine].clone() for x in (q, k, v, dout))
    k.requires_grad_()
    out = tasp.attention(q, k, v, plan, group)
    out.backward(dout)
    return out.detach(), k.grad


def _of_the_sum(rank: int, group: Any, plan: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
    q, k, v = (tasp.shard(x, plan, rank) for x in (q, k, v))
    k.requires_grad_()
    out = tasp.attention(q, k, v, plan, group)
    out.sum().backward()
    return out.detach(), k.grad


WRONG = {
    "check_mask": {
        "does not see itself": _strict,
        "not causal": _full,
        "one document": lambda cu: np.tri(cu[-1], dtype=bool),
    },
    "check_needed": {
        "all pairs with a common document": _common_document,
        "all pairs with an earlier token": _earlier,
        "readers and owners swapped": _swapped,
        "no pair": lambda cu, tokens: set(),
        "lists": lambda cu, tokens: [[0, 1]],
    },
    "check_balance": {
        "equal runs of each document": _runs,
        "equal work, unequal tokens": _equal_work,
        "complete documents": _complete_documents,
        "the last token of each piece lost": _one_short,
        "halves of tokens": _halves_of_tokens,
        "documents counted from 1": lambda lengths, ranks: [
            [(d + 1, a, b) for d, a, b in pieces] for pieces in _runs(lengths, ranks)
        ],
        "tokens without their documents": lambda lengths, ranks: [[(0, 1)] for _ in range(ranks)],
    },
    "check_run": {
        "slices in the order of the sequence": _in_sequence_order,
        "the gradient of another output": _of_the_sum,
    },
    "check_recap": {
        "with pairs across documents": [15, 0, "ring", 2, 60],
        "the later tokens": [9, 0, "ring", 2, 40],
    },
}
