"""Unit 1, attention in pieces: one head's attention with its lse, and checks.

Shapes: q [T, D], k and v [S, D], out [T, D], lse [T]; T queries, S keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tasp_core.runtime.merge import merge

from .verdict import exercise, expect, recap

Part = tuple[Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Part:
    """Attention of every query over all keys, and its lse; without a key they are 0 and -inf."""
    if not len(k):
        return torch.zeros_like(q), q.new_full((len(q),), -math.inf)
    score = q @ k.T / math.sqrt(q.shape[1])
    return torch.softmax(score, dim=1) @ v, torch.logsumexp(score, dim=1)


def join(first: Part, second: Part) -> Part:
    """The package's merge, which has a head axis, for one head."""
    out, lse = merge(*(x.unsqueeze(1) for x in (*first, *second)))
    return out.squeeze(1), lse.squeeze(1)


def fold(parts: Iterable[Part]) -> Part:
    """All partial outputs merged, in their order."""
    return reduce(join, parts)


def _draw(sizes: list[int], scale: float = 1.0) -> tuple[Tensor, list[Part]]:
    """Queries, and blocks of keys and values of these sizes."""
    rng = torch.Generator().manual_seed(len(sizes) + sum(sizes))
    q = torch.randn(6, 8, generator=rng)
    return scale * q, [
        (torch.randn(n, 8, generator=rng), torch.randn(n, 8, generator=rng)) for n in sizes
    ]


def _exact(q: Tensor, blocks: list[Part]) -> Part:
    k, v = (torch.cat(x).double() for x in zip(*blocks, strict=True))
    return attend(q.double(), k, v)


@exercise
def check_lse(answer: Any) -> None:
    """The lse of four sets of keys."""
    hints = {
        "one": (3.0, "log of e to the power of the only score"),
        "eight": (math.log(8), "eight terms, each e^0 = 1"),
        "two": (1000.0, "compared with e^1000, e^0 is negligible"),
        "none": (-math.inf, "the log of an empty sum"),
    }
    for name, (value, hint) in hints.items():
        expect(math.isclose(answer[name], value, rel_tol=1e-4), f"{name}: {hint}")


@exercise
def check_merge(answer: Any) -> None:
    """Two partial outputs against float64: usual, huge, empty."""
    cases = (
        ("two sets of 4 and 9 keys", [4, 9], 1.0),
        ("huge scores", [5, 3], 1e3),
        ("the first set is empty", [0, 5], 1.0),
        ("the second set is empty", [5, 0], 1.0),
        ("both sets are empty", [0, 0], 1.0),
    )
    for what, sizes, scale in cases:
        q, blocks = _draw(sizes, scale)
        out, lse = answer(*attend(q, *blocks[0]), *attend(q, *blocks[1]))
        right, right_lse = _exact(q, blocks)
        expect(
            out.shape == right.shape and lse.shape == right_lse.shape,
            f"{what}: return an output [T, D] and an lse [T]",
        )
        expect(
            not torch.isnan(out).any() and not torch.isnan(lse).any(),
            f"{what}: the result contains nan",
        )
        expect(
            torch.allclose(lse.double(), right_lse, rtol=1e-5, atol=1e-5),
            f"{what}: the lse is wrong",
        )
        far = float((out - right).abs().max())
        expect(far < 1e-3, f"{what}: the lse is right, the output is off by up to {far:.2g}")


def _overwritten(blocks: list[Part]) -> Iterator[Part]:
    """The blocks, each in the same memory as the one before."""
    most = max(len(k) for k, _ in blocks)
    memory = torch.empty(2, most, 8)
    for k, v in blocks:
        memory.fill_(math.nan)
        memory[0, : len(k)], memory[1, : len(v)] = k, v
        yield memory[0, : len(k)], memory[1, : len(v)]
    memory.fill_(math.nan)


@exercise
def check_stream(answer: Any) -> None:
    """Blocks of unequal lengths, one at a time in the same memory."""
    for sizes in ([4, 4], [1, 0, 7, 2], [0, 3, 0], [9]):
        q, blocks = _draw(sizes)
        out = answer(q, _overwritten(blocks))
        expect(isinstance(out, Tensor), "return the output only, one tensor")
        expect(
            not torch.isnan(out).any(),
            f"blocks of {sizes} keys: the output contains nan; were old blocks kept?",
        )
        far = float((out - _exact(q, blocks)[0]).abs().max())
        expect(far < 1e-4, f"blocks of {sizes} keys: the output is off by up to {far:.2g}")


check_recap = recap(
    ("no", "the sums over the keys of each piece can be added in any order"),
    (-math.inf, "the log of an empty sum"),
    (0.5, "both weights are equal, and add up to 1"),
    (4.0, "equal numbers of keys with equal scores have equal lse"),
    (1, "the lse"),
)
