"""Real packed rows, no download: Python's own manual, one topic a document, one byte a token."""

from __future__ import annotations

import random
from pydoc_data.topics import topics

import numpy as np

from ..documents import Documents
from ..errors import PlanError


def manual_row(tokens: int, first: int = 0) -> tuple[np.ndarray, Documents]:
    """A row of `tokens` byte tokens: manual topics in a shuffled order, the last one cut to fit.

    Args:
        first: where in the shuffled order to begin; the order repeats.

    Returns:
        ids int64 [tokens] in 0..255, and the row's documents.

    >>> ids, docs = manual_row(4096)
    >>> docs.total, len(ids), len(docs.lengths) > 2
    (4096, 4096, True)
    """
    if tokens < 1:
        raise PlanError(f"a row needs at least 1 token, got {tokens}")
    names = sorted(topics)
    random.Random(7).shuffle(names)
    parts: list[np.ndarray] = []
    left = tokens
    while left > 0:
        text = topics[names[(first + len(parts)) % len(names)]].strip().encode()
        part = np.frombuffer(text, dtype=np.uint8)[:left].astype(np.int64)
        parts.append(part)
        left -= len(part)
    return np.concatenate(parts), Documents.of([len(p) for p in parts])
