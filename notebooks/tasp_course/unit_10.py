"""Unit 10, gradients and rounding: checks, and sums that are rounded once per hop."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

import tasp_core as tasp
from tasp_core import Documents, Plan
from tasp_core.kernels.reference import oracle
from tasp_core.lab.bench.accuracy import Inputs
from tasp_core.schedules import DKV

from .verdict import exercise, expect, recap

COUNTS = (4, 16, 64, 256)
DTYPES = (torch.float32, torch.bfloat16)
SUMS, NEAR, FACTOR = 20_000, 1e-9, 1.5

Route = list[tuple[int, int, int]]


def ring(ranks: int, tokens: int = 512) -> Plan:
    """Full attention on one ring: every rank needs the KV of every other rank."""
    docs = Documents.of([tokens], causal=False)
    return tasp.plan(docs, ranks, schedule="ring", layout="contiguous")


@exercise
def check_route(answer: Callable[[int, int], Route]) -> None:
    """The hops (step, src, dst) of the gradient of an owner's KV round a ring."""
    for n in (3, 4, 7):
        hops = ring(n).hops(backward=True)
        hops = hops.where(hops.kind == DKV)
        for owner in range(n):
            mine = hops.where(hops.owner == owner)
            right = sorted(
                zip(mine.step.tolist(), mine.src.tolist(), mine.dst.tolist(), strict=True)
            )
            returned = list(answer(owner, n))
            hops_only = all(isinstance(hop, tuple) and len(hop) == 3 for hop in returned)
            expect(hops_only, f"hops are (step, src, dst), such as (2, 1, 2), got {returned[:1]}")
            got, what = sorted(returned), f"gradient of rank {owner}'s KV, {n} ranks"
            expect(len(got) == n - 1, f"{what}: {n - 1} hops, got {len(got)}")
            expect(
                got[-1][2] == owner, f"{what}: the last hop must end at rank {owner}, got {got[-1]}"
            )
            for have, want in zip(got, right, strict=True):
                hint = "KV arrives in one step, is used in the next, its gradient leaves one step later"
                expect(have[1:] == want[1:], f"{what}: {have} is not on the route of the KV")
                expect(have == want, f"{what}: {have} should be in step {want[0]}; {hint}")


def tiles(seed: int = 10) -> tuple[dict[str, Tensor], list[slice]]:
    """A query block, its KV in three tiles, the final out and lse, and autograd's gradients; float64."""
    draw = torch.Generator().manual_seed(seed)
    x: dict[str, Tensor] = {
        name: torch.randn(rows, 8, generator=draw, dtype=torch.float64)
        for name, rows in (("q", 5), ("k", 12), ("v", 12), ("dout", 5))
    }
    scale = 8**-0.5
    q, k, v = (x[name].requires_grad_() for name in "qkv")
    scores = q @ k.T * scale
    out = scores.softmax(-1) @ v
    out.backward(x["dout"])
    grads = {f"d{name}": x[name].grad for name in "qkv"}
    tensors = {
        **x,
        "out": out,
        "lse": scores.logsumexp(-1),
        "scale": torch.tensor(scale, dtype=torch.float64),
        **grads,
    }
    return {name: t.detach() for name, t in tensors.items() if t is not None}, [
        slice(0, 4),
        slice(4, 5),
        slice(5, 12),
    ]


@exercise
def check_backward(answer: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    """dq, dk, dv of each tile: dq is summed over tiles, dk and dv belong to one tile."""
    x, parts = tiles()
    dq = torch.zeros_like(x["q"])
    for part in parts:
        k, v = x["k"][part], x["v"][part]
        grads = answer(x["dout"], x["q"], k, v, x["out"], x["lse"], float(x["scale"]))
        expect(len(grads) == 3, "return dq, dk, dv")
        for name, got in zip(("dk", "dv"), grads[1:], strict=True):
            off = float((got - x[name][part]).abs().max())
            hint = "weights are exp(score - lse), with the final lse"
            if name == "dk":
                hint = "ds = p * (dout @ v.T - delta) * scale; delta is the row sum of dout * out"
            expect(
                off < NEAR,
                f"{name} of keys {part.start}..{part.stop - 1} is off by {off:.2g}; {hint}",
            )
        dq += grads[0]
    off = float((dq - x["dq"]).abs().max())
    expect(
        off < NEAR, f"dq, summed over the tiles, is off by {off:.2g}; the dq of a tile is ds @ k"
    )


def summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of terms [n, ...], added one after the other and rounded to a dtype each time."""
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total


@lru_cache
def rounding(count: int, dtype: torch.dtype) -> float:
    """Root mean square error of the sum of so many normally distributed terms."""
    draw = torch.Generator().manual_seed(count)
    parts = torch.randn(count, SUMS, generator=draw, dtype=torch.float64)
    return float((summed(parts, dtype).double() - parts.sum(0)).square().mean().sqrt())


@exercise
def check_error(answer: Callable[[int, float], float]) -> None:
    """The predicted error of a sum, from the number of terms and the dtype's eps."""
    for dtype in DTYPES:
        for count in COUNTS:
            got, right = answer(count, torch.finfo(dtype).eps), rounding(count, dtype)
            much = "too much" if got > right else "too little"
            expect(
                right / FACTOR <= got <= right * FACTOR,
                f"{count} terms, {dtype}: {got:.2g} is {much}, the error is {right:.2g}",
            )


def _dk(rank: int, group: object, plan: Plan, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    q, k, v, dout = (tasp.shard(x, plan, rank) for x in inputs.tensors())
    k.requires_grad_()
    tasp.attention(q, k, v, plan, group, grad_comm_dtype=dtype).backward(dout)
    assert k.grad is not None
    return k.grad


def measured(ranks: int, dtype: torch.dtype) -> float:
    """Relative error of dk on real ranks that send gradients in a dtype; tensors are float32."""
    plan = ring(ranks)
    x = Inputs.random(plan.docs.total, 2, 2, 16, seed=10)
    got = tasp.unshard(tasp.launch(_dk, ranks, plan, x, dtype), plan).double()
    exact = oracle(x.q, x.k, x.v, plan.docs, dout=x.dout)["dk"]
    return float((got - exact).norm() / exact.norm())


check_recap = recap(
    (7, "it starts at the rank after its owner and passes all others to the owner"),
    (2, "the same number of elements, 4 bytes each instead of 2"),
    ("final", "a tile's own lse would make its weights add up to 1"),
    ("no", "queries stay on their rank, and dq is added up there"),
    (2, "relative to the sum, the error grows with the square root of the number of terms"),
)
