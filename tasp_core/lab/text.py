"""Real packed rows without a download: Python's own manual, one topic a document, one byte a token."""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np

from ..documents import Documents
from ..errors import PlanError


def manual_row(tokens: int, first: int = 0) -> tuple[np.ndarray, Documents]:
    """A row of `tokens` byte tokens: manual topics from number `first` on, the last one cut to fit.

    Returns:
        ids int64 [tokens] in 0..255, and the row's documents.

    >>> ids, docs = manual_row(1000)
    >>> docs.total, int(docs.lengths.sum()), bytes(ids[:21].astype("uint8")).decode()
    (1000, 1000, 'The "assert" statemen')
    """
    names = sorted(topics)
    if tokens < 1:
        raise PlanError(f"a row needs at least 1 token, got {tokens}")
    parts: list[np.ndarray] = []
    left, at = tokens, first
    while left > 0:
        text = topics[names[at % len(names)]].split("\n", 3)[-1].strip().encode()
        part = np.frombuffer(text, dtype=np.uint8)[:left].astype(np.int64)
        parts.append(part)
        left -= len(part)
        at += 1
    return np.concatenate(parts), Documents.of([len(p) for p in parts])
