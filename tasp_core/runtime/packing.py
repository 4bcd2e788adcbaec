"""Packed messages: what of a step's messages is sent or received at once, and its rows in the buffers.

A `Message` (lowering/program.py) names rows of a buffer, in one part or in several. Rows that lie
together travel from where they are. Small parts are copied into one packed message first, because each
message costs time besides its bytes; large parts travel as a message each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.views import device_cached
from ..lowering.program import RECEIVES, SMALL_BYTES, Message
from ..sequence.layouts import ranges

Buffers = dict[str, Tensor]  # by name: [rows, heads, dim]
TAGS = 1 << 12  # of the messages that two ranks exchange in one step
PARTS = 64  # of a message, that have tags of their own


class PackedMessage(NamedTuple):
    """What is sent or received at once: a message, or one part of a large one."""

    message: Message
    rows: Tensor
    tag: int


def packed_messages(
    messages: Sequence[Message], buffers: Buffers, *, receive: bool
) -> tuple[list[PackedMessage], list[tuple[list[Message], Tensor]]]:
    """The contiguous tensors that a step's messages are sent from or received into.

    A message of adjacent rows is a view of its buffer. Of a message in several parts, large parts are
    views too, and travel as a packed message each; small ones are copied end to end into one. Both ends
    know all sizes, so both divide a message in the same way.
    The order is that of the messages, and of their parts: between two ranks NCCL pairs the first
    send with the first receive, so neither other peers' messages nor the places of rows may change it.

    Args:
        receive: whether the messages are received; small parts then get room to arrive in.

    Returns:
        the packed messages, and what `put_rows` must put in its place after they have arrived: the
        received messages with small parts, one kind of messages at a time, with all their rows.
    """
    packed: list[PackedMessage | Message] = []
    scattered = dict[int, list[int]]()  # places in `packed` of what is gathered, by kind
    for m in messages:
        buffer, dtype = buffers[m.buffer], buffers[RECEIVES[m.kind]].dtype
        if m.rows is None:
            parts = [(m.low, m.count)]
        elif (
            m.count * math.prod(buffer.shape[1:]) * dtype.itemsize <= len(m.rows.src) * SMALL_BYTES
        ):
            scattered.setdefault(m.kind, []).append(len(packed))
            packed.append(m)
            continue
        else:
            parts = m.ranges
        for i, (low, count) in enumerate(parts):
            rows = buffer[low : low + count]
            rows = rows if rows.dtype == dtype else rows.to(dtype)
            packed.append(PackedMessage(m, rows, (m.tag * PARTS + i) % TAGS))
    to_place = []
    for places in scattered.values():
        of_kind = [m for m in map(packed.__getitem__, places) if isinstance(m, Message)]
        if receive:
            buffer = buffers[of_kind[0].buffer]
            gathered = buffer.new_empty((sum(m.count for m in of_kind), *buffer.shape[1:]))
            to_place.append((of_kind, gathered))
        else:
            gathered = take_rows(of_kind, buffers)
        pieces = gathered.split([m.count for m in of_kind])
        for place, m, rows in zip(places, of_kind, pieces, strict=True):
            packed[place] = PackedMessage(m, rows, m.tag * PARTS % TAGS)
    return [p for p in packed if isinstance(p, PackedMessage)], to_place


def _index(messages: Sequence[Message], device: torch.device) -> Tensor:
    """Buffer rows of messages in several parts, end to end; on a device they are remembered."""
    parts = [m.rows for m in messages if m.rows is not None]

    def make() -> Tensor:
        low, count = (np.concatenate([p[i] for p in parts]) for i in (0, 2))
        return torch.from_numpy(ranges(low, low + count)[0]).to(device)

    return device_cached(parts[0].src, f"{len(parts)} messages", device, make)


def _in_16_bytes(rows: Tensor) -> Tensor:
    """The rows in elements of 16 bytes where that divides them: a CPU copies these three times as fast."""
    flat = rows.view(len(rows), math.prod(rows.shape[1:]))
    return flat.view(torch.complex128) if flat.shape[1] * flat.itemsize % 16 == 0 else flat


def take_rows(messages: Sequence[Message], buffers: Buffers) -> Tensor:
    """Rows of one message, or of several of one kind in parts, in the dtype in which they are received."""
    first = messages[0]
    buffer = buffers[first.buffer]
    if first.rows is None:
        rows = buffer[first.low : first.low + first.count]
    else:
        rows = buffer.index_select(0, _index(messages, buffer.device))
    return rows.to(buffers[RECEIVES[first.kind]].dtype)


def put_rows(messages: Sequence[Message], rows: Tensor, buffers: Buffers) -> None:
    """Put the rows of one message, or of several of one kind in parts, where they belong."""
    first = messages[0]
    buffer = buffers[first.buffer]
    if first.rows is None:
        buffer[first.low : first.low + first.count] = rows
    else:
        _in_16_bytes(buffer).index_copy_(0, _index(messages, buffer.device), _in_16_bytes(rows))
