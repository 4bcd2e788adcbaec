"""Wrong answers to unit 1, by check and by what is wrong."""

import math

import torch

from tasp_course.unit_01 import attend, fold


def no_guard(out1, lse1, out2, lse2):
    lse = torch.logaddexp(lse1, lse2)
    return torch.exp(lse1 - lse)[:, None] * out1 + torch.exp(lse2 - lse)[:, None] * out2, lse


def overflows(out1, lse1, out2, lse2):
    a, b = torch.exp(lse1)[:, None], torch.exp(lse2)[:, None]
    return (a * out1 + b * out2) / (a + b), torch.log(a + b)[:, 0]


def forgets_the_last(q, blocks):
    return fold(
        [attend(q, k.clone(), v.clone()) for k, v in blocks][:-1] or [attend(q, q[:0], q[:0])]
    )[0]


def keeps_blocks(q, blocks):
    k, v = (torch.cat(x) for x in zip(*blocks, strict=True))
    return attend(q, k, v)[0]


def starts_at_zero(q, blocks):
    parts = [attend(q, k, v) for k, v in blocks]
    return fold([(torch.zeros_like(q), torch.zeros(len(q))), *parts])[0]


WRONG = {
    "check_lse": {
        "nine keys": {"one": 3, "eight": math.log(9), "two": 1000, "none": -math.inf},
        "0 for no key": {"one": 3, "eight": math.log(8), "two": 1000, "none": 0},
        "the sum, not its log": {"one": math.exp(3), "eight": 8, "two": math.inf, "none": 0},
    },
    "check_merge": {
        "both empty gives nan": no_guard,
        "exp overflows": overflows,
        "the mean": lambda out1, lse1, out2, lse2: ((out1 + out2) / 2, torch.logaddexp(lse1, lse2)),
        "lse added": lambda out1, lse1, out2, lse2: (out1, lse1 + lse2),
    },
    "check_stream": {
        "the last block is left out": forgets_the_last,
        "old blocks are kept": keeps_blocks,
        "starts with lse 0": starts_at_zero,
        "a pair": lambda q, blocks: (torch.zeros_like(q), torch.zeros(len(q))),
        "a constant": lambda q, blocks: torch.zeros_like(q),
    },
    "check_recap": {
        "unweighted": ["no", -math.inf, 1.0, 8.0, 1],
        "0 for no key": ["no", 0.0, 0.5, 4.0, 1],
    },
}
