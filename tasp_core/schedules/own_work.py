"""Own work: in which step the queries of a rank meet its own KV, which is there from the beginning.

A pass goes step by step. A rank begins a step once the ranks with which it exchanges messages have reached
it, so ranks of equal total work still wait for each other wherever the work of a step is not equal, and
wherever messages take longer than what is computed beside them. Work on own KV needs no message: it can be
done in any step. It stays in step 0, unless a later step makes the pass shorter:

    beside long messages     so that they do not have to be waited for, at the end of the backward pass too
    under busier ranks       in steps in which other ranks have more to do

Each pass is planned by itself, on the machine's rates, by trying a few placings and predicting the pass as
costs/simulate.py does. Where own work is done concerns its rank alone: no message depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..machines.machine import Machine
from .counts import load_rows, load_table
from .hops import DKV, DQ, OUT, Hops, Q

HEADS, KV_HEADS, HEAD_DIM, ITEM, ACCUMULATOR = 32, 8, 128, 2, 4  # what is planned for; bytes
TFLOPS = 640.0  # of a machine that does not say
MOST_EXPENSIVE = 1 << 24  # pairs; so sums stay within 64 bits on any machine
WORTH_IT = 256  # a placing must shorten the pass by 1 / WORTH_IT of the busiest rank's work
GOOD_ENOUGH = 64  # no more are tried once no rank waits longer than 1 / GOOD_ENOUGH of that work


class Prices(NamedTuple):
    """What a pass costs besides its pairs, in visible pairs that a rank computes in that time.

    Attributes:
        row: to merge the partial output of one query in a later step than the first.
        first_row: to write one query's output in step 0.
        call: a kernel call.
        message: a step's latency.
        link, port, nic: to move one token's keys and values over a link between two ranks of a node, a
            rank's port inside its node, and its NIC; 0: the machine has no such limit.
        sizes: what a token of each kind of hop weighs, in multiples of its keys and values; by kind.
    """

    row: int
    first_row: int
    call: int
    message: int
    link: int
    port: int
    nic: int
    sizes: np.ndarray

    @classmethod
    def of(cls, machine: Machine, *, backward: bool) -> Prices:
        """Prices on a machine for 16-bit tensors of 32 query and 8 key/value heads of 128."""
        rate = (machine.backward_tflops if backward else 0) or machine.tflops or TFLOPS
        pair_s = (10 if backward else 4) * HEADS * HEAD_DIM / (rate * 1e12)
        kv_bytes = 2 * KV_HEADS * HEAD_DIM * ITEM
        row_bytes = HEADS * HEAD_DIM * (2 if backward else 1)

        def pairs(nbytes: int, gbps: float) -> int:
            return price(nbytes / 1e9 / gbps) if gbps else 0

        def price(seconds: float) -> int:
            if not seconds < MOST_EXPENSIVE * pair_s:  # rates may be anything, infinity too
                return MOST_EXPENSIVE
            return max(1, round(seconds / pair_s))

        sizes = np.ones(5, dtype=np.int64)
        sizes[DKV] = ACCUMULATOR // ITEM
        sizes[Q] = HEADS // (2 * KV_HEADS) * (2 if backward else 1)
        sizes[[OUT, DQ]] = HEADS * ACCUMULATOR // (2 * KV_HEADS * ITEM)
        return cls(
            row=pairs(row_bytes * (3 * ITEM + 2 * ACCUMULATOR), machine.memory_gbps),
            first_row=pairs(row_bytes * 2 * ITEM, machine.memory_gbps),
            call=price(machine.kernel_s),
            message=price(machine.latency_s + machine.message_s),
            link=pairs(kv_bytes, machine.link_gbps),
            port=pairs(kv_bytes, machine.port_gbps or machine.host_gbps),
            nic=pairs(kv_bytes, machine.nic_gbps),
            sizes=sizes,
        )


class Messages(NamedTuple):
    """The messages of a pass: one row for each (step, src, dst), sorted by step, and its price."""

    step: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    price: np.ndarray

    @classmethod
    def of(
        cls, hops: Hops, tokens: np.ndarray, ranks: int, node_size: int, prices: Prices
    ) -> Messages:
        """Messages of hops with these tokens; each is as slow as the busiest resource that it uses."""
        (step, src, dst), [size] = load_rows(
            (hops.step, hops.src, hops.dst), tokens * prices.sizes[hops.kind]
        )
        inside = src // node_size == dst // node_size
        price = np.where(inside, prices.link, 0) * size
        steps = int(step.max(initial=-1)) + 1
        for each, mask in ((prices.port, inside), (prices.nic, ~inside)):
            for end in (src, dst) if each else ():
                load = load_table((steps, ranks), step[mask], end[mask], amount=size[mask])
                price[mask] = np.maximum(price[mask], load[step[mask], end[mask]] * each)
        return cls(step, src, dst, price + prices.message)


class OwnWork(NamedTuple):
    """Each share's queries with the KV of their own rank; int64 arrays, sorted by rank.

    Attributes:
        rank: their rank. pairs: visible pairs. rows: queries.
        visit: as in `Arrivals`; -1 where nothing arrives for their document.
    """

    rank: np.ndarray
    pairs: np.ndarray
    rows: np.ndarray
    visit: np.ndarray


class Pass(NamedTuple):
    """A pass without the work on own KV.

    Attributes:
        work: what else each rank computes, int64 [ranks, steps], in pairs.
        written: whether a visit's outputs are written in a step anyway, bool [visits, steps].
        messages: what travels.
        prices: what it costs.
    """

    work: np.ndarray
    written: np.ndarray
    messages: Messages
    prices: Prices


def place_own(rest: Pass, own: OwnWork) -> tuple[np.ndarray, int, int]:
    """The compute step in which the queries of each share meet their own rank's KV.

    Returns:
        The steps, int64 [shares]; the price of the pass; and what it would be if no rank ever waited.
    """
    result = np.zeros(len(own.rank), dtype=np.int64)
    first = own.pairs + own.rows * rest.prices.first_row
    work = rest.work.sum(axis=1) + load_table((len(rest.work),), own.rank, amount=first)
    busiest = int(work.max())
    least = _price(rest, own, result)
    # moving own work gains no more than that of the rank that has the most
    most = int(load_table((len(rest.work),), own.rank, amount=first).max())
    if not own.pairs.any() or most < least // GOOD_ENOUGH:
        return result, least, busiest
    # of each rank, shares with the fewest pairs per query come first: later steps cost time per query
    order = np.lexsort((own.pairs / np.maximum(1, own.rows), own.rank))
    own = OwnWork(*(column[order] for column in own))
    worth_it = least - busiest // WORTH_IT
    for step in _placings(rest, own):
        if least <= busiest + busiest // GOOD_ENOUGH:
            break
        price = _price(rest, own, step)
        if price < min(least, worth_it):
            result[order], least = step, price
    return result, least, busiest


def _price(rest: Pass, own: OwnWork, step: np.ndarray) -> int:
    """When the last rank ends, in pairs, as costs/simulate.py predicts it."""
    work = rest.work.copy()
    np.add.at(work, (own.rank, step), own.pairs + own.rows * _row_price(rest, own, step))
    calls = np.zeros(work.shape, dtype=bool)
    calls[own.rank, step] = own.pairs > 0
    work += (calls.astype(np.int64) + (rest.work > 0)) * rest.prices.call
    ready = np.zeros(len(work), dtype=np.int64)
    for t, low, high in _steps(rest):
        end = _ends(rest.messages, low, high, ready)
        ready += work[:, t]
        _wait(rest.messages, low, high, ready, end)
    return int(ready.max())


def _row_price(rest: Pass, own: OwnWork, step: np.ndarray) -> np.ndarray:
    """The price of one query's output of each share in its step."""
    if not len(rest.written):
        return np.where(step > 0, rest.prices.row, rest.prices.first_row)
    anyway = rest.written[own.visit, step] & (own.visit >= 0)
    return np.where(step > 0, np.where(anyway, 0, rest.prices.row), rest.prices.first_row)


def _steps(rest: Pass) -> Iterator[tuple[int, int, int]]:
    """Each step, and from where to where its rows of messages go."""
    bounds = np.searchsorted(rest.messages.step, np.arange(rest.work.shape[1] + 1)).tolist()
    for t in range(rest.work.shape[1]):
        yield t, bounds[t], bounds[t + 1]


def _ends(messages: Messages, low: int, high: int, ready: np.ndarray) -> np.ndarray:
    """When messages end that begin when both their ranks have reached the step."""
    src, dst = messages.src[low:high], messages.dst[low:high]
    return np.maximum(ready[src], ready[dst]) + messages.price[low:high]


def _wait(messages: Messages, low: int, high: int, ready: np.ndarray, end: np.ndarray) -> None:
    """Ranks are ready no earlier than their messages have ended; `ready` is written."""
    np.maximum.at(ready, messages.src[low:high], end)
    np.maximum.at(ready, messages.dst[low:high], end)


def _placings(rest: Pass, own: OwnWork) -> Iterator[np.ndarray]:
    """Steps for own work that are worth a try, instead of step 0 for all of it."""
    if not len(rest.messages.step):
        return
    # ranks wait for each other where messages begin; between these steps they do not
    begins = np.unique(np.append(0, rest.messages.step))
    work = np.add.reduceat(rest.work, begins, axis=1)
    most = work.max(axis=0)
    busiest = rest.work.sum(axis=1) + load_table((len(rest.work),), own.rank, amount=own.pairs)
    spare = max(0, int(busiest.max() - most.sum()))
    carried = np.zeros(len(begins), dtype=np.int64)
    np.maximum.at(carried, np.searchsorted(begins, rest.messages.step), rest.messages.price)
    hidden = np.maximum(0, carried - rest.work[:, begins].max(axis=0))
    scaled = hidden * min(spare, int(hidden.sum())) // max(1, int(hidden.sum()))
    for hides, by_density in ((hidden, True), (scaled, True), (scaled, False)):
        target = most + hides
        target[0] += max(0, spare - int(hides.sum()))
        yield begins[_fill(target - work, own, by_density=by_density)]
    yield _fill_waits(rest, own)


def _fill(room: np.ndarray, own: OwnWork, *, by_density: bool) -> np.ndarray:
    """Own work into the room of each rank's steps, step 0 first: int64 [shares].

    Args:
        room: pairs, int64 [ranks, steps].
        by_density: whether step 0 takes the shares with the fewest pairs per query; else the largest.
    """
    result = np.zeros(len(own.rank), dtype=np.int64)
    bounds = np.searchsorted(own.rank, np.arange(len(room) + 1)).tolist()
    for left, low, high in zip(room.copy(), bounds, bounds[1:], strict=False):
        work = own.pairs[low:high]
        if work.sum() <= left[0]:
            continue
        kept = 0
        if by_density:
            kept = int(np.searchsorted(np.cumsum(work), left[0], "right"))
            left[0] -= work[:kept].sum()
        for i in (kept + np.argsort(-work[kept:], kind="stable")).tolist():
            step = 0 if not by_density and work[i] <= left[0] else int(left.argmax())
            result[low + i] = step
            left[step] -= work[i]
    return result


def _fill_waits(rest: Pass, own: OwnWork) -> np.ndarray:
    """Own work where a rank would wait for messages, and the rest of it at the end: int64 [shares]."""
    messages, last = rest.messages, int(rest.messages.step.max())
    result = np.full(len(own.rank), last)
    bounds = np.searchsorted(own.rank, np.arange(len(rest.work) + 1))
    done, ready = bounds[:-1].copy(), np.zeros(len(rest.work), dtype=np.int64)
    first, later = (
        np.append(0, np.cumsum(own.pairs + own.rows * price))
        for price in (rest.prices.first_row, rest.prices.row)
    )
    for t, low, high in _steps(rest):
        if t == last:
            break
        end = _ends(messages, low, high, ready)
        ready += rest.work[:, t]
        computed = ready.copy()
        _wait(messages, low, high, ready, end)
        upto = later if t else first
        for rank in np.flatnonzero((ready > computed) & (done < bounds[1:])).tolist():
            room = upto[done[rank]] + ready[rank] - computed[rank]
            until = int(np.searchsorted(upto[: bounds[rank + 1] + 1], room, "right")) - 1
            result[done[rank] : until] = t
            done[rank] = max(done[rank], until)
    return result
