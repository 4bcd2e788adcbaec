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

from ..errors import TransportError
from ..planning.heads import Heads
from .exchange import Way, over_nccl, post


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
        if over_nccl(self.group, parts[0].device.type):
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
            pending = post(self.group, recvs, out)
        except RuntimeError as error:
            raise self._failure(error) from error
        for (_, peer, _), work in zip((*recvs, *out), pending, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(error, peer) from error
        return found

    def _failure(self, error: RuntimeError, peer: int | None = None) -> TransportError:
        last = self.first + len(self.counts) - 1
        waited = "" if peer is None else f" in waiting for rank {peer}"
        return TransportError(
            f"rank {self.first + self.rank}: heads and tokens of ranks {self.first} to {last} were "
            f"not exchanged{waited}; look for another rank's own error first. "
            f"({str(error).splitlines()[0]})",
            peers=[] if peer is None else [dist.get_global_rank(self.group, peer)],
        )

    def _collective(self, parts: Sequence[Tensor], sizes: Sequence[torch.Size]) -> list[Tensor]:
        world = dist.get_world_size(self.group)
        out, into = [0] * world, [0] * world
        for j, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            out[self.first + j], into[self.first + j] = part.numel(), size.numel()
        send = torch.cat([p.reshape(-1) for p in parts])
        recv = send.new_empty(sum(into))
        try:
            dist.all_to_all_single(recv, send, into, out, group=self.group)
        except RuntimeError as error:
            raise self._failure(error) from error
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


class Ulysses:
    """One call's exchanges around attention: of all heads of own tokens into own heads of all tokens.

    Args:
        group: the ranks that exchange, and each one's heads.
        heads, kv_heads: query heads and key/value heads of a token, of all members together.
    """

    def __init__(self, group: Group, heads: int, kv_heads: int) -> None:
        self.group, self.heads, self.kv_heads = group, heads, kv_heads
        mine, per_kv = group.heads[group.rank], heads // kv_heads
        wanted = [h // per_kv - mine.kv_low for h in range(mine.q_low, mine.q_high)]
        held, size = mine.kv_high - mine.kv_low, len(wanted)
        # kernels share kv heads evenly: query head i uses kv head i * held // size
        even = size % held == 0 and wanted == [i * held // size for i in range(size)]
        self.expand = None if even else wanted  # else one kv head for each query head

    def queries(self, x: Tensor) -> Tensor:
        """[t, ..., H, D] to [T, ..., h, D]."""
        return self.group.to_heads(x, Heads.q)

    def keys(self, x: Tensor) -> Tensor:
        """k or v [t, ..., K, D] to [T, ..., g, D]; g is h where heads do not divide evenly."""
        held = self.group.to_heads(x, Heads.kv)
        if self.expand is None:
            return held
        return held.index_select(-2, torch.tensor(self.expand, device=x.device))

    def results(self, x: Tensor) -> Tensor:
        """out or dq [T, ..., h, D] back to [t, ..., H, D]."""
        return self.group.to_tokens(x, Heads.q, self.heads)

    def key_gradients(self, x: Tensor) -> Tensor:
        """dk or dv [T, ..., g, D] back to [t, ..., K, D]; what several members found adds up."""
        if self.expand is not None:
            mine = self.group.heads[self.group.rank]
            held = x.new_zeros((*x.shape[:-2], mine.kv_high - mine.kv_low, x.shape[-1]))
            x = held.index_add_(-2, torch.tensor(self.expand, device=x.device), x)
        return self.group.to_tokens(x, Heads.kv, self.kv_heads)
