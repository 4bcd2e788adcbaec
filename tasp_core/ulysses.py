"""Ulysses: heads <-> tokens all-to-all around any inner attention (DeepSpeed-Ulysses, USP, HSAP).

Groups of `degree` consecutive ranks share a virtual rank's tokens. Before attention every member
gets all of the group's tokens for its part of the heads; after it, its own tokens for all heads. The
inner plan then runs between members of equal position, group by group: rank g * degree + i talks to
h * degree + i. Key/value heads fewer than the degree travel to every member that needs them, and no
more. Shapes: [t, ..., H, D]; t this rank's tokens, T the group's, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .errors import TransportError
from .heads import Heads
from .transport import Way, over_nccl, post


@dataclass(frozen=True)
class Group:
    """A group of members inside a larger process group.

    Attributes:
        group: the process group of all ranks; on NCCL everybody takes part in every all-to-all.
        first: rank of member 0 in it. rank: this member. counts: tokens of each member.
        heads: each member's heads.
    """

    group: Any
    first: int
    rank: int
    counts: tuple[int, ...]
    heads: tuple[Heads, ...]

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[torch.Size]) -> list[Tensor]:
        """Send parts[j] to member j; what each member sent, with the given shapes."""
        if over_nccl(self.group):
            return self._collective(parts, sizes)
        # gloo's own all-to-all leaves links idle: it takes 1.5 times as long on limited ones
        sends = [p.contiguous() for p in parts]
        found = [p.new_empty(size) for p, size in zip(parts, sizes, strict=True)]
        found[self.rank] = sends[self.rank].view(sizes[self.rank])
        n = len(parts)
        turns = [(self.rank + d) % n for d in range(1, n)]  # every receiver starts with another

        def ways(rows: list[Tensor], some: Iterable[int]) -> list[Way]:
            return [(rows[j], self.first + j, 0) for j in some if rows[j].numel()]

        recvs, out = ways(found, reversed(turns)), ways(sends, turns)
        try:
            for work in post(self.group, recvs, out):
                work.wait()
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.first + self.rank}: heads and tokens of ranks {self.first} to "
                f"{self.first + n - 1} were not exchanged; look for another rank's own error first. "
                f"({str(error).splitlines()[0]})"
            ) from error
        return found

    def _collective(self, parts: Sequence[Tensor], sizes: Sequence[torch.Size]) -> list[Tensor]:
        world = dist.get_world_size(self.group)
        out, into = [0] * world, [0] * world
        for j, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            out[self.first + j], into[self.first + j] = part.numel(), size.numel()
        send = torch.cat([p.reshape(-1) for p in parts])
        recv = send.new_empty(sum(into))
        dist.all_to_all_single(recv, send, into, out, group=self.group)
        pieces = recv.split([s.numel() for s in sizes])
        return [p.view(s) for p, s in zip(pieces, sizes, strict=True)]

    def to_heads(self, x: Tensor, pick: Callable[[Heads, Tensor], Tensor]) -> Tensor:
        """[t, ..., H, D] of all heads to [T, ..., h, D] of this member's heads."""
        mine = pick(self.heads[self.rank], x)
        sizes = [torch.Size((n, *mine.shape[1:])) for n in self.counts]
        return torch.cat(self.exchange([pick(h, x) for h in self.heads], sizes))

    def to_tokens(self, y: Tensor, pick: Callable[[Heads, Tensor], Tensor], heads: int) -> Tensor:
        """[T, ..., h, D] back to [t, ..., H, D]; heads that several members hold add up in order."""
        t = self.counts[self.rank]
        x = y.new_zeros((t, *y.shape[1:-2], heads, y.shape[-1]))
        sizes = [pick(h, x).shape for h in self.heads]
        parts = self.exchange(list(y.split(self.counts)), sizes)
        for h, part in zip(self.heads, parts, strict=True):
            pick(h, x).add_(part)
        return x


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, pick: Any) -> Tensor:
        ctx.args = group, pick, x.shape[-2]
        return group.to_heads(x, pick)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group, pick, heads = ctx.args
        return group.to_tokens(grad, pick, heads), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group, heads: int) -> Tensor:
        ctx.group = group
        return group.to_tokens(y, Heads.q, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.to_heads(grad, Heads.q), None, None


Inner = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def around(inner: Inner, group: Group, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of all heads from `inner`, attention of some heads over all of the group's tokens.

    Args:
        inner: (q [T, ..., h, D], k [T, ..., g, D], v [T, ..., g, E]) -> (out [T, ..., h, E],
            lse [T, ..., h]).
        q, k, v: [t, ..., H, D], [t, ..., K, D], [t, ..., K, E].

    Returns:
        out [t, ..., H, E] and lse [t, ..., H].
    """
    heads, per_kv = q.shape[-2], q.shape[-2] // k.shape[-2]
    mine = group.heads[group.rank]
    qs = _ToHeads.apply(q, group, Heads.q)
    ks, vs = (_ToHeads.apply(x, group, Heads.kv) for x in (k, v))
    wanted = [h // per_kv - mine.kv_low for h in range(mine.q_low, mine.q_high)]
    found, size = mine.kv_high - mine.kv_low, len(wanted)
    if wanted != [
        i * found // size for i in range(size)
    ]:  # no even groups: one kv head a query head
        index = torch.tensor(wanted, device=k.device)
        ks, vs = (x.index_select(-2, index) for x in (ks, vs))
    out, lse = inner(qs, ks, vs)
    with torch.no_grad():
        whole_lse = group.to_tokens(lse[..., None], Heads.q, heads)[..., 0]
    return _ToTokens.apply(out, group, heads), whole_lse
