"""Wrong answers to unit 2, by check and by what is wrong."""

from tasp_course.unit_02 import broken_tables

RIGHT = {
    "A": ("t0 3>1 kv2.0", "t2 0>1 kv2.0"),
    "B": ("", "t2 3>0 kv1.0"),
    "C": ("t2 2>3 kv1.0", "t1 2>3 kv1.0"),
}


def table(n, steps, to, owner):
    return [f"t{t} {r}>{to(r) % n} kv{owner(r, t) % n}.0" for t in range(steps) for r in range(n)]


def direct(n, step):
    return [f"t{step(d)} {r}>{(r + d) % n} kv{r}.0" for d in range(1, n) for r in range(n)]


WRONG = {
    "check_ring": {
        "one step too few": lambda n: table(n, n - 2, lambda r: r + 1, lambda r, t: r - t),
        "one step too many": lambda n: table(n, n, lambda r: r + 1, lambda r, t: r - t),
        "the owner changes in the wrong direction": lambda n: table(
            n, n - 1, lambda r: r + 1, lambda r, t: r + t
        ),
        "always its own KV": lambda n: table(n, n - 1, lambda r: r + 1, lambda r, t: r),
        "to the left": lambda n: table(n, n - 1, lambda r: r - 1, lambda r, t: r + t),
        "steps counted from 1": lambda n: [
            f"t{t} {r}>{(r + 1) % n} kv{(r - t + 1) % n}.0" for t in range(1, n) for r in range(n)
        ],
        "a constant: right for n = 2": lambda n: ["t0 0>1 kv0.0", "t0 1>0 kv1.0"],
    },
    "check_repairs": {
        "one step too early": RIGHT | {"A": ("t0 3>1 kv2.0", "t1 0>1 kv2.0")},
        "the wrong hop is only taken out": RIGHT | {"A": ("t0 3>1 kv2.0", "")},
        "one string, not a pair": RIGHT | {"A": "t0 3>1 kv2.0"},
        "another hop is taken out": RIGHT | {"C": (broken_tables()["C"][0], "t1 2>3 kv1.0")},
        "a constant": dict.fromkeys("ABC", ("", "t2 3>0 kv1.0")),
    },
    "check_quick": {
        "the ring": lambda n, ports: table(n, n - 1, lambda r: r + 1, lambda r, t: r - t),
        "one share too many per step": lambda n, ports: direct(n, lambda d: d // (ports + 1)),
        "everything at once": lambda n, ports: direct(n, lambda d: 0),
        "one step too late": lambda n, ports: direct(n, lambda d: d // ports),
    },
    "check_recap": {
        "sender for receiver": [2, 1, 7, 8, 3],
        "one step too many": [5, 1, 8, 8, 3],
        "all links": [5, 1, 7, 56, 3],
    },
}
