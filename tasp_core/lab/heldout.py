"""Held-out loss by position in the document: does a token far into a long document profit from it?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .feed import IGNORE, Local

BUCKETS = (0, 64, 256, 1024, 4096, 16384, 65536)  # a bucket begins at each


def bucket_loss(
    rows: Iterable[Local],
    logits_of: Callable[[Local], Tensor],
    add_up: Callable[[list], list[float]],
) -> dict[str, dict[str, float]]:
    """Mean loss of the rows' labelled tokens, in all and by their position in their document.

    Args:
        rows: this rank's tokens. logits_of: a row -> logits [t, V].
        add_up: sums over the ranks, so that every rank gets the same answer.

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
