"""Ulysses: an all-to-all of heads and tokens around attention (DeepSpeed-Ulysses, USP, HSAP).

Groups of `degree` consecutive ranks share the tokens of one rank of the context-parallel plan. Before
attention every member gets all of the group's tokens for its part of the heads; after it, its own
tokens for all heads. The context-parallel plan runs between members of equal position, group by group:
rank g * degree + i talks to h * degree + i. KV heads fewer than the degree travel to every member that
needs them, and no more.
Shapes: [t, ..., H, D]; t this rank's tokens, T the group's, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..planning.heads import Heads
from .exchange import Exchange


@dataclass(frozen=True)
class Group:
    """A Ulysses group: consecutive ranks of all that call attention together.

    Attributes:
        exchange: of this rank; in a process group over NCCL all ranks take part in every all-to-all.
        first: the group's first rank. rank: this rank's position in the group.
        counts: tokens of each member.
        heads: each member's heads.
    """

    exchange: Exchange
    first: int
    rank: int
    counts: tuple[int, ...]
    heads: tuple[Heads, ...]

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Send parts[j] to member j; what each member sent, of the given shapes."""
        peers = range(self.first, self.first + len(self.counts))
        return self.exchange.all_to_all(peers, parts, shapes, "heads and tokens")

    def to_heads(self, x: Tensor, pick: Callable[[Heads, Tensor], Tensor]) -> Tensor:
        """[t, ..., H, D] of all heads to [T, ..., h, D] of this member's heads."""
        mine = pick(self.heads[self.rank], x)
        shapes = [torch.Size((n, *mine.shape[1:])) for n in self.counts]
        return torch.cat(self.all_to_all([pick(h, x) for h in self.heads], shapes))

    def to_tokens(self, y: Tensor, pick: Callable[[Heads, Tensor], Tensor], heads: int) -> Tensor:
        """[T, ..., h, D] back to [t, ..., H, D]; heads that several members hold add up in order."""
        t = self.counts[self.rank]
        x = y.new_zeros((t, *y.shape[1:-2], heads, y.shape[-1]))
        shapes = [pick(h, x).shape for h in self.heads]
        parts = self.all_to_all(list(y.split(self.counts)), shapes)
        for h, part in zip(self.heads, parts, strict=True):
            pick(h, x).add_(part)
        return x


class Ulysses:
    """One call's all-to-alls around attention.

    Args:
        group: the ranks that exchange, and each one's heads.
        heads, kv_heads: query heads and KV heads of a token, of all members together.
    """

    def __init__(self, group: Group, heads: int, kv_heads: int) -> None:
        self.group, self.heads, self.kv_heads = group, heads, kv_heads
        mine, per_kv = group.heads[group.rank], heads // kv_heads
        # of each of this rank's query heads, which of its KV heads it uses
        used = [h // per_kv - mine.kv_low for h in range(mine.q_low, mine.q_high)]
        num_kv, num_q = mine.kv_high - mine.kv_low, len(used)
        # kernels divide KV heads evenly: query head i uses KV head i * num_kv // num_q
        even = num_q % num_kv == 0 and used == [i * num_kv // num_q for i in range(num_q)]
        self.expand = None if even else used  # else one KV head for each query head

    def queries(self, x: Tensor) -> Tensor:
        """q or dout [t, ..., H, D] to [T, ..., h, D]."""
        return self.group.to_heads(x, Heads.q)

    def keys(self, x: Tensor) -> Tensor:
        """k or v [t, ..., K, D] to [T, ..., g, D]; g is h where heads do not divide evenly."""
        own = self.group.to_heads(x, Heads.kv)
        if self.expand is None:
            return own
        return own.index_select(-2, torch.tensor(self.expand, device=x.device))

    def results(self, x: Tensor) -> Tensor:
        """out or dq [T, ..., h, D] back to [t, ..., H, D]."""
        return self.group.to_tokens(x, Heads.q, self.heads)

    def key_gradients(self, x: Tensor) -> Tensor:
        """dk or dv [T, ..., g, D] back to [t, ..., K, D]; what several members computed adds up."""
        if self.expand is not None:
            mine = self.group.heads[self.group.rank]
            own = x.new_zeros((*x.shape[:-2], mine.kv_high - mine.kv_low, x.shape[-1]))
            x = own.index_add_(-2, torch.tensor(self.expand, device=x.device), x)
        return self.group.to_tokens(x, Heads.kv, self.kv_heads)
