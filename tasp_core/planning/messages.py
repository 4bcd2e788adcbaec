"""Messages: what a rank's hops put on each link in each step, in the order in which both ends post it.

NCCL has no tags: between two ranks the first send meets the first receive, the second the second.
So the order is part of the plan: of a step and link, what a rank's own hop table says, in the order
in which it says it. Everything else that both ends derive (a message's rows, its parts, its tag)
follows from that sequence. `lower` makes programs of it, `check` proves that both ends agree on it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from ..schedules import KINDS, Hops
from .plan import Plan

MOST_NAMED = 4  # shares of a message that an error names
TAG_BITS = 20


class Messages(NamedTuple):
    """Hops that carry tokens, and the messages in which they travel; int64 arrays of equal length."""

    hops: Hops
    number: np.ndarray  # hops of equal number travel as one message; in the order of the table
    tag: np.ndarray  # number of the message on its link in its step, from 0


class Moves(NamedTuple):
    """`Messages` with one row per sub-chunk; sub-chunks without tokens are dropped."""

    step: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    owner: np.ndarray
    share: np.ndarray
    kind: np.ndarray
    subchunk: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides tuple.count
    message: np.ndarray  # rows of equal number travel as one message
    tag: np.ndarray

    def at(self, mask: np.ndarray) -> Moves:
        """The rows of a boolean mask, or of indices."""
        return Moves(*(column[mask] for column in self))

    def during(self, step: int) -> Moves:
        """The rows of one step; steps must not decrease."""
        low, high = np.searchsorted(self.step, (step, step + 1))
        return Moves(*(column[low:high] for column in self))


def starts(*columns: np.ndarray) -> np.ndarray:
    """Whether a row differs from the one before in any column, bool; the first row does."""
    new = np.zeros(len(columns[0]), dtype=bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def messages_of(plan: Plan, hops: Hops) -> Messages:
    """Hops as messages: consecutive hops of one step, link and kind are one message.

    Args:
        hops: in the order of their steps; hops without tokens are dropped.

    Raises:
        PlanError: the steps decrease somewhere.

    >>> from tasp_core import plan
    >>> p = plan([64], ranks=4, schedule="ring")
    >>> hops = p.hops(0, backward=True)
    >>> messages = messages_of(p, hops.where((hops.dst == 1) & (hops.step == 2)))
    >>> messages.hops.lines(), messages.number.tolist(), messages.tag.tolist()
    (['t2 0>1 kv2.0', 't2 0>1 dkv3.0'], [0, 1], [0, 1])
    """
    late = np.flatnonzero(hops.step[1:] < hops.step[:-1])
    if late.size:
        one, other = hops.where(late[0] + np.arange(2)).lines()
        raise PlanError(f"a hop table must be in the order of its steps: {other} comes after {one}")
    hops = hops.where(plan.tokens_moved(hops) > 0)
    new_link = starts(hops.step, hops.src, hops.dst)
    number = np.cumsum(new_link | starts(hops.kind)) - 1
    # a tag counts from the first message of the hop's link and step
    first = number[np.flatnonzero(new_link)]
    tag = number - first[np.cumsum(new_link) - 1] if len(first) else number
    return Messages(hops, number, tag)


def moves_of(plan: Plan, hops: Hops) -> Moves:
    """One row for each sub-chunk that hops move, in their order, with its message of `messages_of`."""
    messages, parts = messages_of(plan, hops), plan.subchunks.parts
    subchunk = np.stack([plan.subchunk_of(messages.hops, p) for p in range(parts)], axis=1).ravel()
    count = plan.subchunks.count[subchunk]
    keep = count > 0
    columns = [np.repeat(c, parts)[keep] for c in (*messages.hops, messages.number, messages.tag)]
    return Moves._make([*columns[:6], subchunk[keep], count[keep], *columns[6:]])


class Mispairing(NamedTuple):
    """Message `number` of `step` from `src` to `dst`, on which two tables differ.

    `sent` is that message in words as `src` derives it from its own hop table, `expected` as `dst`
    does or the table of all ranks has it; "nothing" where there is none. `who` expects that, in words.
    """

    step: int
    src: int
    dst: int
    number: int
    sent: str
    expected: str
    who: str

    def __str__(self) -> str:
        return (
            f"in step {self.step}, message {self.number} from rank {self.src} to rank {self.dst}: rank "
            f"{self.src} sends {self.sent}, {self.who} {self.expected}. Messages of two ranks pair up in "
            "the order in which they are posted: list the hops of a link and step in one order in "
            "every rank's hop table, e.g. that of Hops.ordered()"
        )


class _End(NamedTuple):
    """Messages of all links, those of a link and step in the order of their end: a row for each hop."""

    link: np.ndarray  # (step * ranks + src) * ranks + dst, ascending
    code: np.ndarray  # kind, owner, share, tag, and whether a message begins

    @classmethod
    def of(cls, tables: list[tuple[np.ndarray, np.ndarray]]) -> _End:
        link, code = (np.concatenate(columns) for columns in zip(*tables, strict=True))
        order = np.argsort(link, kind="stable")
        return cls(link[order], code[order])


def _inside(plan: Plan, hops: Hops) -> bool:
    """Whether hops name ranks and shares of the plan only."""
    limits = (plan.ranks, plan.ranks, plan.ranks, plan.schedule.num_shares)
    return not len(hops.step) or all(
        int(column.min()) >= 0 and int(column.max()) < most
        for column, most in zip(hops[1:5], limits, strict=True)
    )


def _coded(plan: Plan, hops: Hops) -> tuple[np.ndarray, np.ndarray]:
    """`link` and `code` of an `_End`, for each hop that carries tokens."""
    (step, src, dst, owner, share, kind), number, tag = messages_of(plan, hops)
    link = (step * plan.ranks + src) * plan.ranks + dst
    what = (owner * plan.schedule.num_shares + share) * len(KINDS) + kind
    return link, ((what << TAG_BITS) + tag) * 2 + starts(number)


def _texts(plan: Plan, end: _End, link: int) -> list[str]:
    """The messages of a link and step in words: "kv0.1 kv0.2 (96 tokens)"."""
    low, high = np.searchsorted(end.link, (link, link + 1))
    code = end.code[low:high]  # taken apart here as `_coded` puts it together
    owned, kind = np.divmod(code >> TAG_BITS + 1, len(KINDS))
    owner, share = np.divmod(owned, plan.schedule.num_shares)
    # the tokens of a share do not depend on step, src and dst: any values do
    tokens = plan.tokens_moved(Hops(kind, kind, kind, owner, share, kind))
    result = []
    for rows in np.split(np.arange(len(code)), np.flatnonzero(code & 1)[1:]) if len(code) else ():
        names = [f"{KINDS[kind[i]]}{owner[i]}.{share[i]}" for i in rows]
        more = [f"+{len(names) - MOST_NAMED}"] if len(names) > MOST_NAMED else []
        size = int(tokens[rows].sum())
        result.append(" ".join([*names[:MOST_NAMED], *more, f"({size} token{'s' * (size != 1)})"]))
    return result


def _difference(plan: Plan, one: _End, other: _End, who: str) -> Mispairing | None:
    """The first message in which two ends differ."""
    if np.array_equal(one.link, other.link) and np.array_equal(one.code, other.code):
        return None
    n = min(len(one.link), len(other.link))
    differ = (one.link[:n] != other.link[:n]) | (one.code[:n] != other.code[:n])
    at = int(differ.argmax()) if differ.any() else n
    link = min(int(end.link[at]) for end in (one, other) if at < len(end.link))
    sides = [_texts(plan, end, link) for end in (one, other)]
    pairs = [*zip(*sides, strict=False)]
    number = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    sent, expected = (side[number] if number < len(side) else "nothing" for side in sides)
    step, pair = divmod(link, plan.ranks**2)
    src, dst = divmod(pair, plan.ranks)
    return Mispairing(step, src, dst, number, sent, expected, who or f"rank {dst} expects")


def mispairing(plan: Plan, table: Hops, *, backward: bool) -> Mispairing | None:
    """The first message on which the two ends of a link do not agree, or None: all pair up.

    Compares what every rank sends by its own table with what its peers expect by theirs, and with
    `table`, the one of all ranks, of which everything else is proved.

    Raises:
        PlanError: a table that no messages can be made of.
    """
    n, sends, recvs = plan.ranks, [], []
    for rank in range(n):
        hops = plan.hops(rank, backward=backward)
        if not _inside(plan, hops):
            raise PlanError(
                f"rank {rank}'s own hop table names a rank outside 0..{n - 1} or a share outside "
                f"0..{plan.schedule.num_shares - 1}"
            )
        link, code = _coded(plan, hops)
        src, dst = np.divmod(link % n**2, n)
        sends.append((link[src == rank], code[src == rank]))
        recvs.append((link[dst == rank], code[dst == rank]))
    sent, expected = _End.of(sends), _End.of(recvs)
    if fault := _difference(plan, sent, expected, ""):
        return fault
    joint = _End.of([_coded(plan, table)])
    return _difference(plan, sent, joint, "the table of all ranks has")
