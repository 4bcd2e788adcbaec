"""Train the tiny Llama on packed sequences of real text, on one rank or several, by the same code."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ...planner import plan
from ...runtime.attention import attention
from ...runtime.loss import next_token_labels, token_loss
from ...runtime.sharding import shard
from .data import manual_sequence
from .llama import TinyLlama


def train(
    rank: int,
    group: Any,
    ranks: int,
    *,
    steps: int,
    tokens: int,
    schedule: str = "tasp",
    layout: str = "zigzag",
    seed: int = 0,
    lr: float = 3e-3,
) -> list[float]:
    """The losses of `steps` AdamW steps, each on a new packed sequence with a new plan, on each of `ranks`.

    The loss of a sequence without a target is NaN. Gradients are summed over ranks (see runtime/loss.py),
    so that every rank keeps the same weights.
    """
    torch.manual_seed(seed)
    model = TinyLlama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6)
    losses = []
    for step in range(steps):
        tokens_of_step, docs = manual_sequence(tokens, first=5 * step)
        p = plan(docs, ranks, schedule=schedule, layout=layout)
        ids = torch.from_numpy(tokens_of_step)
        labels = shard(next_token_labels(ids, docs), p, rank)
        local, positions = shard(ids, p, rank), torch.from_numpy(p.positions(rank))
        logits = model(local, positions, lambda q, k, v, p=p: attention(q, k, v, p, group))
        total, count = token_loss(logits, labels, group, inputs=local, plan=p)
        loss = total / count.clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        if ranks > 1:
            for value in (shown, *(w.grad for w in model.parameters())):
                dist.all_reduce(value, group=group)
        optimizer.step()
        losses.append(float(shown) if count else math.nan)
    return losses
