"""Documents: a packed row, i.e. documents laid end to end without padding.

A token attends to tokens of its own document only. Documents may be empty or one token long.
Everything else in the package asks this class where a document begins, which tokens a piece of
the row shares with it, and how many (query, key) pairs are visible.

A sliding window counts the token itself: causal, token i sees i - window + 1 .. i; full, all closer
than `window` on either side. Not covered: other masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import PlanError, check_int


def _whole_numbers(values: Any) -> np.ndarray | None:
    """A 1-D int64 array of the values, or None where one of them is not a whole number."""
    try:
        found = np.array(values)
        if found.ndim != 1 or found.dtype.kind not in "iuf":
            return np.zeros(0, dtype=np.int64) if found.size == 0 and found.ndim == 1 else None
        if not np.isfinite(found).all():
            return None
        return found.astype(np.int64) if (found == np.floor(found)).all() else None
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of one packed row of `total` tokens.

    Document d holds tokens `cu_seqlens[d] .. cu_seqlens[d + 1] - 1` (flash-attn's convention).

    >>> docs = Documents.of([3, 0, 2])
    >>> docs.total, docs.cu_seqlens.tolist(), docs.positions().tolist()
    (5, [0, 3, 3, 5], [0, 1, 2, 0, 1])
    >>> docs.num_pairs          # 3*4/2 + 2*3/2
    9
    """

    cu_seqlens: Any
    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        cu = _whole_numbers(self.cu_seqlens)
        if cu is None or not cu.size:
            raise PlanError(
                f"cu_seqlens must be a 1-D list of whole numbers, got {self.cu_seqlens!r}"
            )
        if cu[0] != 0:
            raise PlanError(f"cu_seqlens must begin with 0, got {cu[0]}; prepend a 0")
        drops = np.flatnonzero(np.diff(cu) < 0)
        if drops.size:
            d = int(drops[0])
            raise PlanError(
                f"cu_seqlens must not decrease, but entry {d + 1} is {cu[d + 1]} after {cu[d]}; "
                "documents are given in row order and do not overlap"
            )
        if self.window is not None:
            object.__setattr__(self, "window", check_int(self.window, "window", 1, PlanError))
        cu.flags.writeable = False
        object.__setattr__(self, "cu_seqlens", cu)
        object.__setattr__(self, "causal", bool(self.causal))

    @classmethod
    def of(
        cls, lengths: Iterable[int], *, causal: bool = True, window: int | None = None
    ) -> Documents:
        """Documents of the given lengths in tokens, in row order; a window of 1 sees the token itself.

        Raises:
            PlanError: a length is negative or not a whole number; a window below 1.
        """
        items = list(lengths)
        sizes = _whole_numbers(items)
        if sizes is None or (sizes < 0).any():
            bad = next((x for x in items if (n := _whole_numbers([x])) is None or n[0] < 0), items)
            raise PlanError(f"document lengths must be whole numbers >= 0, got {bad!r}")
        cu = np.concatenate([[0], np.cumsum(sizes)])
        return cls(cu.astype(np.int64), causal, window)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Sequence[int] | np.ndarray | Any,
        *,
        total: int | None = None,
        causal: bool = True,
        window: int | None = None,
    ) -> Documents:
        """Documents from flash-attn's cumulative lengths; `total`, tokens in the row, must match.

        Raises:
            PlanError: entries decrease, do not begin with 0, or do not end at `total`.
        """
        docs = cls(cu_seqlens, causal, window)
        if total is not None and docs.total != total:
            word = "overruns" if docs.total > total else "stops short of"
            raise PlanError(
                f"cu_seqlens {word} the row: it ends at {docs.total}, the row has {total} tokens; "
                "its last entry must equal the row's length"
            )
        return docs

    @property
    def total(self) -> int:
        """Tokens in the row."""
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.cu_seqlens)

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs of the row: what attention has to compute."""
        length = self.lengths
        if self.total > 2**31:  # exact integers where int64 would overflow
            length = length.astype(object)
        if not self.causal:
            w = length if self.window is None else np.minimum(length, self.window)
            # a full mask with a window sees w - 1 tokens on either side
            return int((length * length - (length - w) * (length - w + 1)).sum())
        w = length if self.window is None else np.minimum(length, self.window)
        return int((w * (w + 1) // 2 + (length - w) * w).sum())

    @cached_property
    def window_size(self) -> tuple[int, int] | None:
        """Tokens seen (before, after) one, flash-attn's `window_size`; None: the window hides nothing.

        >>> Documents.of([300], window=128).window_size
        (127, 0)
        """
        if self.window is None or self.window >= self.lengths.max(initial=0):
            return None
        return self.window - 1, 0 if self.causal else self.window - 1

    def document_of(self, tokens: np.ndarray) -> np.ndarray:
        """Index of the document that holds each global token id."""
        return np.searchsorted(self.cu_seqlens, tokens, side="right") - 1

    def positions(self, tokens: np.ndarray | None = None) -> np.ndarray:
        """Position of each token inside its document (for rotary embeddings), int64."""
        ids = np.arange(self.total) if tokens is None else np.asarray(tokens, dtype=np.int64)
        return ids - self.cu_seqlens[self.document_of(ids)]

    def _key(self) -> tuple[bytes, bool, int | None]:
        return self.cu_seqlens.tobytes(), self.causal, self.window

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        text = ", ".join(map(str, self.lengths[:8]))
        more = f", ... {len(self.lengths)} documents" if len(self.lengths) > 8 else ""
        window = f", window={self.window}" if self.window is not None else ""
        return f"Documents.of([{text}{more}], causal={self.causal}{window})"
