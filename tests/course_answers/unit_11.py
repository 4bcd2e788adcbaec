"""Wrong answers to the exercises of unit 11."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from tasp_course.unit_11 import Clock, Run, fitted

JOB = {
    "SBATCH_PARTITION": "gpu",
    "SBATCH_GPUS_PER_NODE": "8",
    "TASP_DEVICE": "cuda",
    "TASP_INTERFACE": "ib0",
    "arguments": "--methods ring,tasp --lengths 131072",
}


def _samples(run: Run, clock: Clock, repeats: int) -> list[float]:
    samples = []
    for _ in range(repeats):
        start = clock()
        run()
        samples.append(clock() - start)
    return samples


def _warm_mean(run: Run, clock: Clock, repeats: int) -> float:
    run()
    return mean(_samples(run, clock, repeats))


def _unweighted_fit(nbytes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    per_byte, latency_s = np.polyfit(nbytes, seconds, 1)
    return float(latency_s), float(1e-9 / per_byte)


def _ratio(data: dict[str, Any], *, all_ranks: bool = True) -> float:
    ranks = [median(samples) for samples in data["rank_cpu_s"]]
    return (sum(ranks) if all_ranks else max(ranks)) / median(data["plain_cpu_s"])


WRONG = {
    "check_bench": {
        "no warm-up": lambda run, clock, n: median(_samples(run, clock, n)),
        "the mean": _warm_mean,
        "the first call counts": lambda run, clock, n: mean(_samples(run, clock, n + 1)),
    },
    "check_slowest": {
        "the mean of ranks": lambda by_rank: median(mean(p) for p in zip(*by_rank, strict=True)),
        "the largest sample": lambda by_rank: max(max(samples) for samples in by_rank),
        "a number for each pass": lambda by_rank: [max(x) for x in zip(*by_rank, strict=True)],
        "the slowest rank's median": lambda by_rank: max(median(samples) for samples in by_rank),
    },
    "check_fit": {
        "unweighted least squares": _unweighted_fit,
        "the smallest and the largest message": lambda n, s: (s[0], n[-1] / s[-1] / 1e9),
        "GB/s for B/s": lambda n, s: (fitted(n, s)[0], fitted(n, s)[1] * 1e9),
    },
    "check_job": {
        "one GPU per node": {**JOB, "SBATCH_GPUS_PER_NODE": "1"},
        "an unknown type of GPU": {**JOB, "SBATCH_GPUS_PER_NODE": "gpu:8"},
        "a number": {**JOB, "SBATCH_GPUS_PER_NODE": 8},
        "a description": {**JOB, "SBATCH_GPUS_PER_NODE": "8 H100"},
        "no interface": {**JOB, "TASP_INTERFACE": ""},
        "arguments forgotten": {**JOB, "arguments": ""},
    },
    "check_ratio": {
        "the slowest rank only": lambda data: _ratio(data, all_ranks=False),
        "a ratio of wrong results, too": _ratio,
    },
    "check_recap": {
        "with the first call": [1.4, "modelled", 16, "latency", 2],
        "as measured": [1.0, "measured", 16, "latency", 2],
    },
}
