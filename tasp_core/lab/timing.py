"""Timed transfers and runs on all ranks of a group at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..transport import Way, post

Pairs = Sequence[tuple[int, int]]
LEAST_S, LEAST_BYTES, MOST_BYTES, ROUNDS = 0.1, 1 << 18, 1 << 28, 16


@dataclass
class Bench:
    """Timed transfers and kernels on the ranks of a group; all ranks call alike."""

    group: Any
    device: torch.device
    repeats: int = 3
    samples: dict[str, list[float]] = field(default_factory=dict)
    busy_s: float = 0.0  # processor time of the last timed run, mean over ranks

    def __post_init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)

    def slowest(self, seconds: float) -> float:
        """The slowest rank's time, on all ranks."""
        return self._agreed(seconds, dist.ReduceOp.MAX)

    def _agreed(self, seconds: float, how: dist.ReduceOp.RedOpType) -> float:
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, how, group=self.group)
        return float(value)

    def timed(self, run: Callable[[], Any]) -> float:
        """Seconds of the slowest rank, all having met first."""
        dist.barrier(group=self.group)
        start, busy = time.perf_counter(), time.process_time()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        self.busy_s = self._agreed(busy, dist.ReduceOp.SUM) / self.ranks
        return self.slowest(seconds)

    def send(self, pairs: Pairs, nbytes: int, messages: int = 1) -> None:
        """All transfers at once, each in so many messages."""

        def ways(peers: list[int]) -> list[Way]:
            size = nbytes // messages
            return [
                (torch.empty(size, dtype=torch.uint8, device=self.device), peer, tag)
                for tag in range(messages)
                for peer in peers
            ]

        recvs = ways([a for a, b in pairs if b == self.rank])
        sends = ways([b for a, b in pairs if a == self.rank])
        for work in post(self.group, recvs, sends):
            work.wait()

    def gbps(self, name: str, pairs: Pairs) -> float:
        """GB/s that each transfer gets when all run at once; a first one takes what buckets hold."""
        nbytes, seconds = LEAST_BYTES // 2, 0.0
        while seconds < LEAST_S and nbytes < MOST_BYTES:
            nbytes *= 2 if seconds == 0 else max(2, min(16, int(LEAST_S / seconds) + 1))
            seconds = self.timed(partial(self.send, pairs, nbytes))
        found = [self.timed(lambda: self.send(pairs, nbytes)) for _ in range(self.repeats)]
        self.samples[f"{name}, {nbytes} bytes"] = found
        return nbytes / float(np.median(found)) / 1e9

    def steps(self, name: str, pairs: Pairs, nbytes: int, messages: int) -> float:
        """Seconds a step of that many messages on each way takes, one step after another."""

        def steps() -> None:
            for _ in range(ROUNDS):
                self.send(pairs, nbytes, messages)

        found = [self.timed(steps) / ROUNDS for _ in range(self.repeats + 1)][1:]
        self.samples[f"{name}, {nbytes} bytes in {messages} messages a step"] = found
        return float(np.median(found))
