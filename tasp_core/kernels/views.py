"""Rows of a kernel call's sequences, as kernels want them: batches of views, or rows end to end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..lowering.program import Call
from ..sequence.layouts import ranges

Made = TypeVar("Made")
_MADE: dict[tuple[int, str, torch.device], Any] = {}


def device_cached(
    array: np.ndarray, kind: str, device: torch.device, make: Callable[[], Made]
) -> Made:
    """make(), remembered for as long as the program that owns `array` lives.

    A program's indices go to a device once, not at every layer of every step. What is made must
    not keep `array` itself alive.
    """
    key = (id(array), kind, device)
    if key not in _MADE:
        _MADE[key] = make()
        weakref.finalize(array, _MADE.pop, key, None)
    return _MADE[key]


def aligned(x: Tensor) -> Tensor:
    """x [..., D], copied where a row may start off a 16-byte border.

    GPU kernels refuse such rows; matrix products on some CPUs round them differently.
    """
    offsets = [_address(x), *(n * x.itemsize for n in x.stride()[:-1])]  # of rows, in bytes
    if x.stride(-1) == 1 and all(n % 16 == 0 for n in offsets):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _address(x: Tensor) -> int:
    """Where x begins; of a subclass without memory (a fake tensor), counted from its storage."""
    if type(x) is Tensor:
        return x.data_ptr()  # storages that another library has allocated may begin anywhere
    return int(x.storage_offset()) * x.itemsize


class Picker:
    """Query and key rows of a call, end to end, and their cumulative lengths on the device.

    Rows of inverse causal sequences are picked backwards, and their results put back in order.
    """

    def __init__(self, call: Call, device: torch.device) -> None:
        seq, n = call.sequences, call.inverse_causal
        sides = ((seq.q_lo, seq.q_n), (seq.k_lo, seq.k_n))
        self.rows = [row_index(low, count, device, n) for low, count in sides]
        ends = [(np.cumsum(count) - count, count) for _, count in sides]
        self.back = [row_index(low, count, device, n) for low, count in ends]
        cu = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (seq.q_n, seq.k_n)]
        self.sizes = (
            *(torch.from_numpy(c).to(device) for c in cu),
            int(seq.q_n.max()),
            int(seq.k_n.max()),
        )

    @classmethod
    def of(cls, call: Call, device: torch.device) -> Picker:
        """The picker of this call's sequences, made once per device."""
        return device_cached(call.sequences.q_lo, "picker", device, lambda: cls(call, device))

    def q(self, x: Tensor) -> Tensor:
        return x[self.rows[0]]

    def k(self, x: Tensor) -> Tensor:
        return x[self.rows[1]]

    def back_q(self, x: Tensor) -> Tensor:
        return x[self.back[0]]

    def back_k(self, x: Tensor) -> Tensor:
        return x[self.back[1]]


def row_index(
    low: np.ndarray, count: np.ndarray, device: torch.device, backwards: int = 0
) -> slice | Tensor:
    """The rows of the ranges [low, low + count) end to end, as a selection of a tensor's rows.

    Args:
        backwards: so many of the last ranges run from their end to their beginning.
    """
    if not backwards and (low[1:] == low[:-1] + count[:-1]).all():
        return slice(int(low[0]), int(low[-1] + count[-1]))
    row, in_range = ranges(low, low + count)
    turned = (2 * low + count - 1)[in_range] - row  # first + last row of the range - row
    row = np.where(in_range < len(low) - backwards, row, turned)
    return torch.from_numpy(row).to(device)


def each(call: Call) -> Iterator[tuple[int, int, int, int, bool]]:
    """(first query row, rows, first key row, rows, inverse causal) of each sequence."""
    inverse_causal = (
        np.arange(len(call.sequences.q_lo)) >= len(call.sequences.q_lo) - call.inverse_causal
    )
    return zip(*(c.tolist() for c in (*call.sequences, inverse_causal)), strict=True)


def batches(call: Call) -> Iterator[tuple[Any, Any, Any]]:
    """Views [B, H, L, D] of the query and key rows of sequences of one shape at even distances.

    The third function brings results [B, H, L, D] of either back to rows end to end; inverse causal
    sequences are copies that run backwards.
    """
    seq, i = call.sequences, 0
    total = len(seq.q_lo)
    upright = total - call.inverse_causal
    step = [np.diff(seq.q_lo), np.diff(seq.k_lo)]
    same = (np.diff(seq.q_n) == 0) & (np.diff(seq.k_n) == 0) & (step[0] >= 0) & (step[1] >= 0)
    same &= np.arange(1, total) != upright
    while i < total:
        j = i
        while j + 1 < total and same[j] and step[0][j] == step[0][i] and step[1][j] == step[1][i]:
            j += 1
        gap = (int(step[0][i]), int(step[1][i])) if j > i else (0, 0)
        rows = _view(int(seq.q_lo[i]), int(seq.q_n[i]), gap[0], j - i + 1)
        keys = _view(int(seq.k_lo[i]), int(seq.k_n[i]), gap[1], j - i + 1)
        yield (rows, keys, end_to_end) if i < upright else _inverse_causal(rows, keys)
        i = j + 1


def _inverse_causal(rows: Any, keys: Any) -> tuple[Any, Any, Any]:
    return (
        lambda x: rows(x).flip(2),
        lambda x: keys(x).flip(2),
        lambda x: end_to_end(x.flip(2)),
    )


def _view(low: int, count: int, gap: int, batch: int) -> Any:
    def view(x: Tensor) -> Tensor:
        row, head, dim = x.stride()
        size = (batch, x.shape[1], count, x.shape[2])
        return x.as_strided(size, (gap * row, head, row, dim), x.storage_offset() + low * row)

    return view


def end_to_end(x: Tensor) -> Tensor:
    """[B, H, L, D] to [B L, H, D]."""
    return x.transpose(1, 2).flatten(0, 1)
