"""Lines for `tc` that limit what an interface sends, and share it fairly among the ranks beyond it.

Where one interface leads to several ranks (a NIC, a switch's port) their bytes take turns, as those of
connections do on a real NIC. In one queue for all, a word that a receiver is ready would wait behind
what is sent to others.
"""

from __future__ import annotations

from collections.abc import Sequence

BURST_S, LEAST_BURST, QUEUE_BYTES, MTU = 1e-3, 128 << 10, 16 << 20, 65000
PACKET = MTU + 14  # with its Ethernet header
FIRST = 0x10  # number of the first rank's class


def address(rank: int) -> str:
    """A rank's own, the same on all its interfaces."""
    return f"10.77.0.{rank + 1}"


def shape(name: str, mbit: float, side: str, peers: Sequence[int]) -> list[str]:
    """Limit what interface `name` sends.

    Args:
        side: "dst" where `peers` are those it sends to, "src" where it sends what comes from them.

    >>> shape("to1", 50.0, "dst", [1])
    ['qdisc add dev to1 root tbf rate 50000000bit burst 131072 limit 16777216']
    >>> [line.split()[0] for line in shape("nic", 50.0, "dst", [4, 5])]
    ['qdisc', 'class', 'class', 'filter', 'class', 'filter']
    """
    rate = int(mbit * 1e6)
    burst = max(LEAST_BURST, int(rate / 8 * BURST_S))
    if len(peers) < 2:
        return [f"qdisc add dev {name} root tbf rate {rate}bit burst {burst} limit {QUEUE_BYTES}"]
    lines = [
        f"qdisc add dev {name} root handle 1: htb default {FIRST:x}",
        f"class add dev {name} parent 1: classid 1:1 htb rate {rate}bit burst {burst} cburst {burst}",
    ]
    for number, peer in enumerate(peers, FIRST):
        lines += [
            f"class add dev {name} parent 1:1 classid 1:{number:x} htb rate {rate // len(peers)}bit "
            f"ceil {rate}bit burst {PACKET} cburst {burst} quantum {PACKET}",
            f"filter add dev {name} parent 1: protocol ip prio 1 u32 "
            f"match ip {side} {address(peer)}/32 flowid 1:{number:x}",
        ]
    return lines
