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
        "links only": lambda words, machine: Counter("link {}>{}".format(*ends(w)) for w in words),
        "used, not how often": lambda words, machine: {
            name: 1 for w in words for name in machine.resources(*ends(w))
        },
        "the way back": lambda words, machine: Counter(
            name for w in words for name in machine.resources(*ends(w)[::-1])
        ),
        "only the first resource": lambda words, machine: Counter(
            machine.resources(*ends(w))[0] for w in words
        ),
        "a constant": lambda words, machine: {},
        "a list": lambda words, machine: [n for w in words for n in machine.resources(*ends(w))],
        "what it does not use, too": lambda words, machine: (
            {"link 0>0": 0} | Counter(n for w in words for n in machine.resources(*ends(w)))
        ),
    },
    "check_nvlinks": {
        "one column off": lambda text: rows(text, 2),
        "one where there are any": lambda text: rows(text, 1, lambda c: int(c.startswith("NV"))),
        "a constant": lambda text: [[0] * 8 for _ in range(8)],
        "one digit": lambda text: rows(text, 1, lambda c: int(c[2]) if c.startswith("NV") else 0),
        "text": lambda text: rows(text, 1, lambda c: c[2:] if c.startswith("NV") else "0"),
    },
    "check_recap": {
        "pairs without direction": [28, 8, 150, "nic", "switch"],
        "one link only": [56, 8, 50, "nic", "switch"],
        "the other machine": [56, 8, 150, "nic", "mesh"],
    },
}
