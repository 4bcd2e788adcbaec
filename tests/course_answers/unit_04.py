"""Wrong answers to unit 4, by check and by what is wrong."""


def rows(n, cell):
    return [[cell(r, t) for t in range(n)] for r in range(n)]


def blocks(total, n, first, second):
    size = total // (2 * n)
    return [*range(first * size, (first + 1) * size), *range(second * size, (second + 1) * size)]


def work(own, later):
    return lambda n, b: rows(n, lambda r, t: own(b) if t == 0 else b * b if t <= r else later(b))


WRONG = {
    "check_work": {
        "a token does not see itself": work(lambda b: b * (b - 1) // 2, lambda b: 0),
        "half of the square, rounded": work(lambda b: b * b // 2, lambda b: 0),
        "no mask": work(lambda b: b * b, lambda b: b * b),
        "a constant": lambda n, b: rows(n, lambda r, t: 0),
        "later steps left out": lambda n, b: [[b * (b + 1) // 2] + [b * b] * r for r in range(n)],
        "one list, not n lists": lambda n, b: [b * b] * n,
    },
    "check_zigzag": {
        "the next block": lambda rank, n, total: blocks(total, n, 2 * rank, 2 * rank + 1),
        "one off at the back": lambda rank, n, total: blocks(total, n, rank, 2 * n - 2 - rank),
        "the same for all": lambda rank, n, total: blocks(total, n, 0, 2 * n - 1),
        "the back block in reverse order": lambda rank, n, total: (
            blocks(total, n, rank, rank)[: total // (2 * n)]
            + blocks(total, n, 2 * n - 1 - rank, 0)[: total // (2 * n)][::-1]
        ),
        "ranges in a list": lambda rank, n, total: [range(rank, rank + 1), range(total - 1, total)],
        "striped": lambda rank, n, total: list(range(rank, total, n)),
    },
    "check_bound": {
        "a constant": lambda n: 2.0,
        "the own block counted in full": lambda n: 2 * n / (n + 1),
        "one off": lambda n: 2 - 1 / (n + 1),
    },
    "check_recap": {
        "a token does not see itself": [6, 1, 6, 2.0, 1.0],
        "blocks counted from 1": [10, 1, 7, 2.0, 1.0],
        "as for one document": [10, 1, 6, 2.0, 1.5],
    },
}
