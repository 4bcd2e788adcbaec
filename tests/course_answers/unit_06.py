"""Wrong answers to unit 6, by check and by what is wrong."""

from itertools import pairwise

import tasp_core as tasp


def shifts(n):
    return [[(k * i) % n for i in range(n)] for k in range(1, n)]


def folded(n, path, directions=2):
    m = n - 1
    rings = [[m, *((i + p) % m for p in path(m))] for i in range(m)]
    return rings + [ring[::-1] for ring in rings][: len(rings) * (directions - 1)]


def zigzag(m):
    return [(t + 1) // 2 if t % 2 else -(t // 2) for t in range(m)]


def travel(rings, steps, owner, share=lambda i: i):
    n = len(rings[0])
    return [
        f"t{t} {a}>{b} kv{ring[owner(p, t) % n]}.{share(i)}"
        for i, ring in enumerate(rings)
        for t in range(steps(n))
        for p, (a, b) in enumerate(pairwise((*ring, ring[0])))
    ]


WRONG = {
    "check_by_hand": {
        "one ring four times": [[0, 1, 2, 3, 4]] * 4,
        "both directions of two, one wrong": [
            [0, 1, 2, 3, 4],
            [4, 3, 2, 1, 0],
            [0, 2, 4, 1, 3],
            [0, 3, 1, 2, 4],
        ],
        "three rings": [[0, 1, 2, 3, 4], [0, 2, 4, 1, 3], [0, 3, 1, 4, 2]],
        "copied from the picture": [
            [4, 0, 1, 3, 2],
            [4, 1, 2, 0, 3],
            [4, 2, 3, 1, 0],
            [4, 3, 0, 2, 1],
        ],
        "one ring": [0, 2, 4, 1],
        "closed twice": [
            [0, 1, 2, 3, 4, 0],
            [0, 2, 4, 1, 3, 0],
            [0, 3, 1, 4, 2, 0],
            [0, 4, 3, 2, 1, 0],
        ],
    },
    "check_disjoint": {
        "adding k, for any n": shifts,
        "a constant": lambda n: [],
        "one ring too few": lambda n: [] if n in (4, 6) else list(tasp.decompose(n).cycles[1:]),
        "None for no solution": lambda n: None if n in (4, 6) else list(tasp.decompose(n).cycles),
        "four and six folded": lambda n: list(tasp.decompose(n).cycles),
    },
    "check_folded": {
        "one direction": lambda n: folded(n, zigzag, directions=1),
        "not a zigzag": lambda n: folded(n, lambda m: range(m)),
        "one step too far": lambda n: folded(
            n, lambda m: [t // 2 if t % 2 else -(t // 2) for t in range(m)]
        ),
        "a constant": lambda n: [list(range(n))] * (2 * n - 2),
    },
    "check_travel": {
        "one step too few": lambda rings: travel(rings, lambda n: n - 2, lambda p, t: p - t),
        "one step more, to the owner": lambda rings: travel(rings, lambda n: n, lambda p, t: p - t),
        "the owner changes in the wrong direction": lambda rings: travel(
            rings, lambda n: n - 1, lambda p, t: p + t
        ),
        "always share 0": lambda rings: travel(
            rings, lambda n: n - 1, lambda p, t: p - t, share=lambda i: 0
        ),
        "tuples": lambda rings: [(0, a, b) for ring in rings for a, b in pairwise(ring)],
        "all shares round one ring": lambda rings: travel(
            [rings[0]] * len(rings), lambda n: n - 1, lambda p, t: p - t
        ),
    },
    "check_recap": {
        "pairs without direction": [21, 6, [4, 6], 10, 7],
        "as many as ranks": [42, 7, [4, 6], 12, 8],
        "only four": [42, 6, [4], 10, 7],
    },
}
