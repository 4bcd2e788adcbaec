"""Unit 11, measuring honestly: checks, transfers measured on real ranks, a dry run of a Slurm job."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import tasp_core as tasp
from tasp_core.lab.bench.accuracy import Inputs
from tasp_core.lab.bench.calibrate import Bench
from visualize import Figure
from visualize.curves import Curve, plot
from visualize.timeline import seconds as shown

from .verdict import exercise, expect, recap

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "visualize" / "recorded"
SIZES = (64, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
FIT, NEAR = 0.1, 1e-6
NOISE, TIMES = 0.2, 9  # of the samples to fit: their largest relative error, and how many per size

Run = Callable[[], None]
Clock = Callable[[], float]


class Fake:
    """A workload with known costs and its own clock: the first call is slow, one call is disturbed."""

    def __init__(self, usual: float = 1.0) -> None:
        self.now, self.costs, self.usual = 0.0, list[float](), usual

    def clock(self) -> float:
        """Seconds since the start."""
        return self.now

    def run(self) -> None:
        """One call."""
        n = len(self.costs)
        cost = 40.0 if n == 0 else 9.0 if n == 3 else 1 + 0.01 * (n * 7 % 5)
        self.costs.append(cost * self.usual)
        self.now += self.costs[-1]


@exercise
def check_bench(answer: Callable[[Run, Clock, int], float]) -> None:
    """Seconds of a call: the median of calls that are timed one by one, after a warm-up."""
    for repeats, usual in ((5, 1.0), (9, 1e-3)):
        fake = Fake(usual)
        got = answer(fake.run, fake.clock, repeats)
        calls = len(fake.costs)
        expect(
            calls >= repeats, f"{repeats} timed calls are asked for, run was called {calls} times"
        )
        hint = "the first call takes 40 times as long and must not count"
        expect(calls > repeats, f"{hint}: call run once before the {repeats} timed calls")
        right = median(fake.costs[-repeats:])
        expect(
            abs(got - right) < NEAR * usual,
            f"the costs are {[round(c / usual, 2) for c in fake.costs]}, the first is the warm-up; "
            f"got {got / usual:.4g}, the median of the others is {right / usual:.4g}",
        )


@exercise
def check_slowest(answer: Callable[[list[list[float]]], float]) -> None:
    """Seconds of a pass, from the samples of all ranks."""
    for by_rank in ([[1.0, 4.0, 1.2], [3.0, 1.0, 1.1], [2.0, 2.0, 9.0]], [[1.0, 5.0, 2.0]] * 2):
        right = median(max(passes) for passes in zip(*by_rank, strict=True))
        got = answer(by_rank)
        expect(np.ndim(got) == 0, f"one number is asked for, got {got}")
        hint = "a pass is over when its slowest rank is done; return the median over passes"
        expect(abs(got - right) < NEAR, f"{by_rank}: got {got}; {hint}")


@exercise
def check_fit(answer: Callable[[Sequence[int], Sequence[float]], tuple[float, float]]) -> None:
    """Latency and bandwidth from noisy samples."""
    sizes = sorted(SIZES * TIMES)
    for seed, (latency_s, gbps) in product(range(3), ((10e-6, 50.0), (80e-6, 1.2), (2e-6, 400.0))):
        noise = np.random.default_rng(seed).uniform(1 - NOISE, 1 + NOISE, len(sizes))
        samples = [
            (latency_s + n / gbps / 1e9) * x for n, x in zip(sizes, noise.tolist(), strict=True)
        ]
        fit = answer(sizes, samples)
        expect(len(fit) == 2, "return latency_s and gbps")
        for name, got, right in zip(("latency_s", "gbps"), fit, (latency_s, gbps), strict=True):
            hint = f"samples have errors of up to {NOISE:.0%}: use all, with equal relative weight"
            expect(abs(got / right - 1) < FIT, f"{name} is {right:.3g}, got {got:.3g}; {hint}")


def fitted(nbytes: Sequence[int], samples: Sequence[float]) -> tuple[float, float]:
    """Latency in seconds and GB/s, with equal relative weight on all samples."""
    weight = 1 / np.array(samples)
    columns = np.stack([np.ones(len(samples)), np.array(nbytes) / 1e9], axis=1)
    latency_s, per_gb = np.linalg.lstsq(
        columns * weight[:, None], np.ones(len(samples)), rcond=None
    )[0]
    return float(latency_s), float(1 / per_gb)


def _transfers(rank: int, group: Any, repeats: int) -> list[float]:
    bench = Bench(group, torch.device("cpu"))
    medians = []
    for nbytes in SIZES:
        send = partial(bench.send, [(0, 1)], nbytes)
        medians.append(median([bench.timed(send) for _ in range(repeats + 2)][2:]))
    return medians


def transfers(repeats: int = 7) -> list[float]:
    """Seconds in which each of SIZES bytes is sent from one real rank to another on this machine."""
    return tasp.launch(_transfers, 2, repeats)[0]


def picture(samples: Sequence[float]) -> Figure:
    """Measured transfers, and the model with the fitted figures."""
    latency_s, gbps = fitted(SIZES, samples)
    model = [latency_s + n / gbps / 1e9 for n in SIZES]
    curves = [
        Curve("a message", "measured", "#0072B2", tuple(zip(SIZES, samples, strict=True))),
        Curve(
            "fitted time",
            "modelled",
            "#D55E00",
            tuple(zip(SIZES, model, strict=True)),
        ),
    ]
    title = f"Fitted to two ranks of this machine: {shown(latency_s)} + bytes / ({gbps:.3g} GB/s)"
    desc = ", ".join(f"{n} bytes {shown(s)}" for n, s in zip(SIZES, samples, strict=True))
    drawing = plot(curves, "bytes", "time", shown)
    return Figure(
        title,
        ("Medians of several runs; before each, the two ranks wait for each other.",),
        desc,
        drawing,
    )


def _calls(rank: int, group: Any, calls: int) -> list[float]:
    plan = tasp.plan([256], 2, schedule="ring")
    q, k, v, _ = (tasp.shard(x, plan, rank) for x in Inputs.random(256, 4, 4, 32).tensors())
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        tasp.attention(q, k, v, plan, group)
        seconds.append(time.perf_counter() - start)
    return seconds


def first_calls(calls: int = 7) -> list[list[float]]:
    """Seconds of the first calls of attention on two new ranks."""
    return tasp.launch(_calls, 2, calls)


def dry_run(settings: dict[str, str], job: str = "bench_h100_multinode") -> tuple[int, str]:
    """Exit code and output of a job's dry run: settings as for site.sh, "arguments" for the program."""
    variables = {k: v for k, v in settings.items() if k != "arguments"}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "TASP"))}
    command = [
        "bash",
        f"slurm/{job}.sbatch",
        "--dry-run",
        *shlex.split(settings.get("arguments", "")),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@exercise
def check_job(answer: dict[str, str]) -> None:
    """Settings with which the dry run starts 16 ranks on 2 nodes for the methods and lengths asked for."""
    odd = next((f"{k!r}: {v!r}" for k, v in answer.items() if not isinstance(v, str)), "")
    expect(not odd, f"settings are strings, as in a shell; this one is not: {odd}")
    gpus = answer["SBATCH_GPUS_PER_NODE"]
    expect(
        gpus.casefold() in ("8", "h100:8"),
        f"a node has 8 H100: write 8, or h100:8 (see site.sh), not {gpus!r}",
    )
    code, output = dry_run(answer)
    expect(code == 0, f"exit code {code}: {output.strip().splitlines()[-1]}")
    last = shlex.split(output.strip().splitlines()[-1].replace("=", " "))
    options = dict(pairwise(last))
    expect(
        options.get("--nproc-per-node") == "8",
        "8 ranks per node are asked for: how many GPUs does a node have?",
    )
    expect(answer["SBATCH_PARTITION"] == "gpu", "the partition is gpu")
    expect(answer["TASP_DEVICE"] == "cuda", "how does torch name the device type of an H100?")
    expect(answer["TASP_INTERFACE"] == "ib0", "the network interface of the nodes is ib0")
    # the last value of an option counts
    for name, right in (("--methods", "ring,tasp"), ("--lengths", "131072")):
        got = options.get(name, "nothing")
        expect(got == right, f"{name} {right} is asked for, the program receives {got}")


@exercise
def check_ratio(answer: Callable[[dict[str, Any]], Any]) -> None:
    """The overhead in a result file, or "wrong" where its results were wrong."""
    data = json.loads((RESULTS / "overhead.json").read_text())
    other = {
        **data,
        "plain_cpu_s": [2.0, 50.0, 2.2],
        "rank_cpu_s": [[1.0, 1.1, 7.0], [1.5, 1.5, 1.4]],
    }
    for content, right in ((data, data["ratio"]), (other, 2.6 / 2.2)):
        got = answer({k: v for k, v in content.items() if k not in ("ratio", "least_ratio")})
        hint = "the median of each rank, added up, over the median of the single process"
        expect(not isinstance(got, str), "the results in this file are right: return a ratio")
        expect(abs(got - right) < 1e-9, f"{right:.4f} is right, got {got:.4f}: {hint}")
    got = answer({**other, "right": False})
    expect(got == "wrong", f'where data["right"] is false, return the string "wrong"; got {got}')


check_recap = recap(
    (1.0, "the first call is the warm-up; report the median of the others"),
    ("modelled", "simulate runs no attention"),
    (16, "nodes times GPUs per node"),
    ("latency", "the bytes take 1 us, the latency is 10 us"),
    (2, "0 means success, 1 a wrong result; which one means wrong usage?"),
)
