"""The wires that build a Machine out of network namespaces: between which ranks and hubs, at which rates.

A transfer over one resource ("link 0>1") is a wire between two ranks. A transfer over an out-resource and
an in-resource ("port_out 0", "port_in 1") goes over a hub, a bridge in a namespace of its own, to
which each rank has one wire: these are NVSwitch ports and NICs. Every wire is shaped at both ends.

    >>> from tasp_core import machine
    >>> w = wiring(emulated(machine("mesh2x2"), link_mbit=64.3))
    >>> [(x.a, x.b, round(x.out_mbit, 2)) for x in w.wires[:3]], w.via[0]
    ([(0, 1, 64.3), (2, 3, 64.3), (0, 'nic', 50.0)], {1: 'to1', 2: 'nic', 3: 'nic'})

`shape` writes the lines for `tc` that limit what an interface sends. Where one interface leads to several
ranks (a NIC, a switch's port), each of them has a queue, and the queues take turns, as connections do on a
real NIC: in a single queue a short message to one rank would wait behind what is sent to others.
Nothing is built here; network.py does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...errors import TopologyError
from ...machines.machine import Machine

MOST_RANKS = 250  # addresses are 10.77.0.1 and up
RATES = ("link_gbps", "port_gbps", "host_gbps", "nic_gbps")
PROCESSOR = ("message_cpu_s", "copy_gbps", "ranks_a_core")
MTU = 65000
PACKET = MTU + 14  # with its Ethernet header
BURST_S, LEAST_BURST = 1e-3, 128 << 10  # a token bucket holds so many seconds of its rate, or bytes
QUEUE_BYTES = 16 << 20
FIRST_CLASS = 0x10  # number of the first rank's queue
KERNEL = ("tflops", "backward_tflops", "kernel_s", "memory_gbps", "message_s", *PROCESSOR)


class Wire(NamedTuple):
    """A wire from rank `a` to rank or hub `b`, with the rate of each direction."""

    a: int
    b: int | str
    out_mbit: float  # a -> b
    in_mbit: float  # b -> a

    @property
    def names(self) -> tuple[str, str]:
        """Names of its interfaces at `a` and at `b`."""
        return (f"to{self.b}" if isinstance(self.b, int) else self.b), f"to{self.a}"


class Wiring(NamedTuple):
    """All wires, the hubs they lead to, and by rank and peer the interface that leads to the peer."""

    wires: tuple[Wire, ...]
    hubs: tuple[str, ...]
    via: tuple[dict[int, str], ...]


def emulated(machine: Machine, *, link_mbit: float) -> Machine:
    """The machine slowed down until a link or port inside a node carries `link_mbit` Mbit/s.

    All ratios of rates are kept. Its figures of kernels are set to 0: kernels are not emulated.

    Raises:
        TopologyError: a rate that is not positive.

    >>> from tasp_core import machine
    >>> slow = emulated(machine("h100x2"), link_mbit=450)
    >>> slow.port_gbps * 8e3, round(slow.nic_gbps * 8e3, 1)
    (450.0, 50.0)
    """
    if not 0 < link_mbit < float("inf"):
        raise TopologyError(f"link_mbit must be a positive number, got {link_mbit!r}")
    rates = {name: getattr(machine, name) for name in RATES}
    factor = link_mbit / 8e3 / next(rate for rate in rates.values() if rate)
    changed: dict[str, Any] = {name: rate * factor for name, rate in rates.items()}
    changed |= dict.fromkeys(KERNEL, 0.0)
    return replace(
        machine,
        name=f"{machine.name}@{link_mbit:g}Mbit",
        source=f"{machine.name} with all rates x {factor:.3g}",
        overrides=tuple((name, rate * factor) for name, rate in machine.overrides),
        burst_bytes=float(LEAST_BURST),
        buses=tuple(bus._replace(gbps=bus.gbps * factor) for bus in machine.buses),
        **changed,
    )


def wiring(machine: Machine) -> Wiring:
    """The wires that make up a machine.

    Raises:
        TopologyError: too few or too many ranks, or a transfer that neither a wire nor a hub can carry.
    """
    if not 2 <= machine.ranks <= MOST_RANKS:
        raise TopologyError(
            f"an emulated network joins 2 to {MOST_RANKS} ranks, machine {machine.name!r} has "
            f"{machine.ranks}"
        )
    wires: list[Wire] = []
    ends: dict[tuple[str, int], dict[str, float]] = {}
    via: tuple[dict[int, str], ...] = tuple({} for _ in range(machine.ranks))
    for src in range(machine.ranks):
        for dst in range(machine.ranks):
            if src == dst:
                continue
            used = machine.resources(src, dst)
            rates = [machine.capacity_gbps(name) * 8e3 for name in used]
            hub, direction = used[0].partition("_")[::2] if used else ("", "")
            if len(used) == 1:
                if src < dst:
                    back = machine.capacity_gbps(machine.resources(dst, src)[0]) * 8e3
                    wires.append(Wire(src, dst, rates[0], back))
                via[src][dst] = f"to{dst}"
            elif [*used] == [f"{hub}_out {src}", f"{hub}_in {dst}"] and direction:
                ends.setdefault((hub, src), {})["out"] = rates[0]
                ends.setdefault((hub, dst), {})["in"] = rates[1]
                via[src][dst] = hub
            else:
                raise TopologyError(
                    f"machine {machine.name!r}: the emulated network cannot build the route "
                    f"{src}>{dst} over {', '.join(used) or 'nothing'}; it builds a link between two "
                    "ranks, or one out-port and one in-port"
                )
    wires += [Wire(rank, hub, ends[hub, rank]["out"], ends[hub, rank]["in"]) for hub, rank in ends]
    return Wiring(tuple(wires), tuple(dict.fromkeys(hub for hub, _ in ends)), via)


def shape(name: str, mbit: float, side: str, peers: Sequence[int]) -> list[str]:
    """Lines for `tc` that limit what interface `name` sends.

    Args:
        side: "dst" if the interface sends to `peers`, "src" if it sends what comes from them.

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
        f"qdisc add dev {name} root handle 1: htb default {FIRST_CLASS:x}",
        f"class add dev {name} parent 1: classid 1:1 htb rate {rate}bit burst {burst} cburst {burst}",
    ]
    for number, peer in enumerate(peers, FIRST_CLASS):
        lines += [
            f"class add dev {name} parent 1:1 classid 1:{number:x} htb rate {rate // len(peers)}bit "
            f"ceil {rate}bit burst {PACKET} cburst {burst} quantum {PACKET}",
            f"filter add dev {name} parent 1: protocol ip prio 1 u32 "
            f"match ip {side} {address(peer)}/32 flowid 1:{number:x}",
        ]
    return lines


def address(rank: int) -> str:
    """A rank's IP address, the same on all its interfaces."""
    return f"10.77.0.{rank + 1}"
