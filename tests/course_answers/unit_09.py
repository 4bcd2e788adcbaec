"""Wrong answers to the exercises of unit 9."""

from __future__ import annotations

from tasp_core import Machine
from tasp_course.planners import Have, Rate, Sent


def _into(machine: Machine, nbytes: float, count: int = 1) -> float:
    n = machine.ranks
    into = [sum(machine.route_gbps(a, r) for a in range(n) if a != r) for r in range(n)]
    return (n - count) * nbytes / min(into) / 1e9


def _slowest_link(machine: Machine, nbytes: float) -> float:
    n = machine.ranks
    slow = min(machine.route_gbps(a, b) for a in range(n) for b in range(n) if a != b)
    return nbytes / slow / 1e9


def _one_at_a_time(rate: Rate, have: Have) -> Sent:
    for src, dst in rate:
        if new := have[src] - have[dst]:
            return [(src, dst, min(new))]
    return []


def _again(rate: Rate, have: Have) -> Sent:
    return [(a, b, min(have[a])) for a, b in rate]


def _what_it_lacks(rate: Rate, have: Have) -> Sent:
    return [(a, b, (b, 0)) for a, b in rate]


def _gives_up(rate: Rate, have: Have) -> Sent:
    return [(a, b, p) for a, b in rate for p in [(a, 0)] if p not in have[b]]


def _all_links(rate: Rate, have: Have) -> Sent:
    sent: Sent = []
    for a, b in rate:
        new = have[a] - have[b] - {p for _, d, p in sent if d == b}
        sent += [(a, b, min(new))] if new else []
    return sent


def _fastest_only(rate: Rate, have: Have) -> Sent:
    sent: Sent = []
    for a, b in sorted(rate, key=lambda link: -rate[link]):
        new = have[a] - have[b] - {p for _, d, p in sent if d == b}
        if new and (not sent or rate[a, b] >= 0.95 * rate[sent[0][:2]]):
            sent.append((a, b, min(new)))
    return sent


WRONG = {
    "check_bound": {
        "only the bytes that enter": _into,
        "the own KV enters, too": lambda machine, nbytes: _into(machine, nbytes, 0),
        "the slowest link": _slowest_link,
    },
    "check_planner": {
        "one share per step": _one_at_a_time,
        "a share that the receiver has already": _again,
        "a share that the sender lacks": _what_it_lacks,
        "first shares only": _gives_up,
        "links without shares": lambda rate, have: list(rate),
        "lists in place of shares": lambda rate, have: [(a, b, [a, 0]) for a, b in rate],
    },
    "check_patient": {
        "all links": _all_links,
        "the fastest links only": _fastest_only,
        "one share per step": _one_at_a_time,
    },
    "check_recap": {
        "with the own KV": [0.125, 10, "no", 24, 0.5],
        "one share per pair of ranks": [0.1, 10, "no", 12, 0.5],
    },
}
