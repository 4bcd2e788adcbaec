"""Wrong answers to unit 5, by check and by what is wrong."""

from collections import Counter

import tasp_core as tasp
from tasp_core import Machine
from tasp_course.unit_05 import ends

MACHINES = {
    "mesh": Machine("mesh", 4, link_gbps=50),
    "switch": Machine("switch", 8, port_gbps=450),
    "cluster": Machine("cluster", 4, 2, link_gbps=64, nic_gbps=25),
}


def rows(text, first, read=lambda cell: int(cell[2:]) if cell.startswith("NV") else 0):
    lines = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    return [[read(c) for c in line[first : len(lines) + first]] for line in lines]


WRONG = {
    "check_machines": {
        "one rank too few": MACHINES | {"mesh": Machine("mesh", 3, link_gbps=50)},
        "links for ports": MACHINES | {"switch": Machine("switch", 8, link_gbps=450)},
        "one node of eight": MACHINES | {"cluster": Machine("cluster", 8, link_gbps=64)},
        "a constant": dict.fromkeys(MACHINES, tasp.machine("mesh4")),
    },
    "check_load": {
        "links only": lambda hops, machine: Counter("link {}>{}".format(*ends(h)) for h in hops),
        "whether a resource is used, not how often": lambda hops, machine: {
            name: 1 for h in hops for name in machine.resources(*ends(h))
        },
        "the opposite direction": lambda hops, machine: Counter(
            name for h in hops for name in machine.resources(*ends(h)[::-1])
        ),
        "only the first resource": lambda hops, machine: Counter(
            machine.resources(*ends(h))[0] for h in hops
        ),
        "a constant": lambda hops, machine: {},
        "a list": lambda hops, machine: [n for h in hops for n in machine.resources(*ends(h))],
        "an unused resource, too": lambda hops, machine: (
            {"link 0>0": 0} | Counter(n for h in hops for n in machine.resources(*ends(h)))
        ),
    },
    "check_nvlinks": {
        "one column off": lambda text: rows(text, 2),
        "1 where there are any NVLinks": lambda text: rows(
            text, 1, lambda c: int(c.startswith("NV"))
        ),
        "a constant": lambda text: [[0] * 8 for _ in range(8)],
        "the first digit only": lambda text: rows(
            text, 1, lambda c: int(c[2]) if c.startswith("NV") else 0
        ),
        "text": lambda text: rows(text, 1, lambda c: c[2:] if c.startswith("NV") else "0"),
    },
    "check_recap": {
        "pairs without direction": [28, 8, 150, "nic", "switch"],
        "one link only": [56, 8, 50, "nic", "switch"],
        "the other machine": [56, 8, 150, "nic", "mesh"],
    },
}
