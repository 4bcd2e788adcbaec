"""A run's metrics: one JSON object per line, in a file that goes on where a resumed run does.

`bucket_loss` is the evaluation: the loss of held-out text by position in the document, which shows
whether a token far into a long document profits from it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .data import IGNORE, Local

EVERY_S = 10.0  # between two printed lines
BUCKETS = (0, 64, 256, 1024, 4096, 16384, 65536)  # positions at which a bucket begins


class Metrics:
    """Appends to metrics.jsonl and prints a line now and then, on the first rank alone."""

    def __init__(self, path: Path, step: int, *, speaks: bool) -> None:
        """Remove the lines that a killed run wrote after `step`: they will be written again."""
        self.path, self.speaks, self.printed_s = path, speaks, -EVERY_S
        if speaks:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [text for text in _lines(path) if json.loads(text)["step"] <= step]
            part = path.with_suffix(".part")
            part.write_text("".join(f"{text}\n" for text in kept))
            part.replace(path)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line of the file."""
        if self.speaks:
            with open(self.path, "a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")

    def say(self, text: str, *, now: bool = True) -> None:
        """Print a line; unless `now`, only when the last one is EVERY_S old."""
        if self.speaks and (now or time.monotonic() - self.printed_s >= EVERY_S):
            print(text, flush=True)
            self.printed_s = time.monotonic()


def _lines(path: Path) -> list[str]:
    """Whole lines; a killed run may have left half of one."""
    text = path.read_text() if path.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def read(path: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The lines of one kind, in order."""
    return [line for line in map(json.loads, _lines(path)) if line["kind"] == kind]


def bucket_loss(
    rows: Iterable[Local],
    logits_of: Callable[[Local], Tensor],
    add_up: Callable[[list], list[float]],
) -> dict[str, dict[str, float]]:
    """Mean loss of the rows' labelled tokens, in all and by their position in their document.

    Args:
        rows: this rank's tokens of packed sequences. logits_of: a row -> logits [t, V].
        add_up: sums values over the ranks, so that every rank returns the same.

    Returns:
        {"all" or "FROM+": {"loss", "targets"}}, buckets without a labelled token left out.
    """
    sums = [torch.zeros(len(BUCKETS), dtype=torch.float64) for _ in range(2)]
    for row in rows:
        labels = torch.from_numpy(row.labels)
        logits = logits_of(row).float()
        loss = cross_entropy(
            logits, labels.to(logits.device), ignore_index=IGNORE, reduction="none"
        )
        starts = torch.tensor(BUCKETS)
        bucket = torch.bucketize(torch.from_numpy(row.positions), starts, right=True) - 1
        for total, values in zip(
            sums, (loss.double().cpu(), (labels != IGNORE).double()), strict=True
        ):
            total.index_add_(0, bucket, values)
    losses, counts = torch.tensor(add_up([*sums[0], *sums[1]])).view(2, -1)
    names = ["all", *(f"{low}+" for low in BUCKETS)]
    losses, counts = (torch.cat([x.sum()[None], x]) for x in (losses, counts))
    return {
        name: {"loss": float(loss / n), "targets": int(n)}
        for name, loss, n in zip(names, losses, counts, strict=True)
        if n
    }
