"""Parcels: what of a step's messages is sent or received at once, and their rows in the buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.views import once
from ..lowering.program import RECEIVES, SMALL_BYTES, Message
from ..sequence.layouts import ranges

Buffers = dict[str, Tensor]
TAGS = 1 << 12  # of the messages that two ranks exchange in one step
PARTS = 64


class PackedMessage(NamedTuple):
    """What is sent or received at once: a message, or one part of a large one."""

    message: Message
    rows: Tensor
    tag: int


def packed_messages(
    messages: Sequence[Message], buffers: Buffers, *, receive: bool
) -> tuple[list[PackedMessage], list[tuple[list[Message], Tensor]]]:
    """What to send or receive, and what of it is to be put in its place once it has arrived.

    Adjacent rows are views of their buffer, and so is each part of a large message; small messages
    of scattered rows are gathered, all of a kind at once. Both ends know all sizes and divide alike.
    The order is that of the messages, and of their parts: between two ranks NCCL pairs the first
    send with the first receive, so what other peers send and how rows lie must not change it.
    """
    posted: list[PackedMessage | Message] = []
    scattered = dict[int, list[int]]()  # places in `posted` of what is gathered, by kind
    for m in messages:
        buffer, dtype = buffers[m.buffer], buffers[RECEIVES[m.kind]].dtype
        if m.rows is None:
            parts = [(m.low, m.count)]
        elif (
            m.count * math.prod(buffer.shape[1:]) * dtype.itemsize <= len(m.rows.src) * SMALL_BYTES
        ):
            scattered.setdefault(m.kind, []).append(len(posted))
            posted.append(m)
            continue
        else:
            parts = m.ranges
        for i, (low, count) in enumerate(parts):
            rows = buffer[low : low + count]
            rows = rows if rows.dtype == dtype else rows.to(dtype)
            posted.append(PackedMessage(m, rows, (m.tag * PARTS + i) % TAGS))
    landing = []
    for places in scattered.values():
        some = [m for m in map(posted.__getitem__, places) if isinstance(m, Message)]
        if receive:
            buffer = buffers[some[0].buffer]
            gathered = buffer.new_empty((sum(m.count for m in some), *buffer.shape[1:]))
            landing.append((some, gathered))
        else:
            gathered = take_rows(some, buffers)
        pieces = gathered.split([m.count for m in some])
        for place, m, rows in zip(places, some, pieces, strict=True):
            posted[place] = PackedMessage(m, rows, m.tag * PARTS % TAGS)
    return [p for p in posted if isinstance(p, PackedMessage)], landing


def _index(messages: Sequence[Message], device: torch.device) -> Tensor:
    """Buffer rows of messages in parts, end to end."""
    parts = [m.rows for m in messages if m.rows is not None]

    def make() -> Tensor:
        low, count = (np.concatenate([p[i] for p in parts]) for i in (0, 2))
        return torch.from_numpy(ranges(low, low + count)[0]).to(device)

    return once(parts[0].src, f"{len(parts)} messages", device, make)


def _wide(rows: Tensor) -> Tensor:
    """The rows' bytes in elements of 16 where they can be seen so: CPUs copy these three times as fast."""
    flat = rows.view(len(rows), math.prod(rows.shape[1:]))
    return flat.view(torch.complex128) if flat.shape[1] * flat.itemsize % 16 == 0 else flat


def take_rows(messages: Sequence[Message], buffers: Buffers) -> Tensor:
    """Rows of one message, or of several in parts, in the dtype in which they are received."""
    first = messages[0]
    buffer = buffers[first.buffer]
    if first.rows is None:
        rows = buffer[first.low : first.low + first.count]
    else:
        rows = buffer.index_select(0, _index(messages, buffer.device))
    return rows.to(buffers[RECEIVES[first.kind]].dtype)


def put_rows(messages: Sequence[Message], rows: Tensor, buffers: Buffers) -> None:
    """Rows of one message, or of several in parts, to where they belong."""
    first = messages[0]
    buffer = buffers[first.buffer]
    if first.rows is None:
        buffer[first.low : first.low + first.count] = rows
    else:
        _wide(buffer).index_copy_(0, _index(messages, buffer.device), _wide(rows))
