"""Documents: a packed sequence, i.e. documents laid end to end without padding, and what its tokens see.

A token attends to tokens of its own document only, unless the mask is a list of slices (`masked`).
Documents may be empty or one token long.
Everything else in the package asks this class where a document begins and which tokens a piece of
the packed sequence shares with it. Which (query, key) pairs are visible is `docs.mask`, see masks.py.

A sliding window counts the token itself: causal, token i sees i - window + 1 .. i; full, all closer
than `window` on either side. Any other mask is a list of slices:

    Documents.masked([8, 4], slices=[(0, 8, 0, 8, "causal"), (8, 12, 0, 12, "causal")])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import PlanError, check_int
from .masks import Mask, Slice


def _whole_numbers(values: Any) -> np.ndarray | None:
    """A 1-D int64 array of the values, or None where one of them is not a whole number."""
    try:
        array = np.array(values)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            return np.zeros(0, dtype=np.int64) if array.size == 0 and array.ndim == 1 else None
        if not np.isfinite(array).all():
            return None
        return array.astype(np.int64) if (array == np.floor(array)).all() else None
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of one packed sequence of `total` tokens.

    Document d holds tokens `cu_seqlens[d] .. cu_seqlens[d + 1] - 1` (flash-attn's convention).

    Attributes:
        causal: whether no token sees one behind it.
        window: tokens that a token sees at most, on one side and counting itself; None: all.
        slices: a mask that takes the place of the documents' own; None: they have theirs.

    >>> docs = Documents.of([3, 0, 2])
    >>> docs.total, docs.cu_seqlens.tolist(), docs.positions().tolist()
    (5, [0, 3, 3, 5], [0, 1, 2, 0, 1])
    >>> docs.num_pairs          # 3*4/2 + 2*3/2
    9
    """

    cu_seqlens: Any
    causal: bool = True
    window: int | None = None
    slices: Mask | None = None

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
                "documents are given in the order of the packed sequence and do not overlap"
            )
        if self.window is not None:
            object.__setattr__(self, "window", check_int(self.window, "window", 1, PlanError))
        cu.flags.writeable = False
        object.__setattr__(self, "cu_seqlens", cu)
        object.__setattr__(self, "causal", bool(self.causal))
        if self.slices is not None:
            self._check_slices(self.slices)

    def _check_slices(self, slices: Mask) -> None:
        if not isinstance(slices, Mask):
            raise PlanError(f"slices must be a Mask; use Documents.masked, got {slices!r:.80}")
        if self.window is not None:
            raise PlanError(
                f"documents with slices have no window, got {self.window}: the slices say what is visible"
            )
        if self.causal != slices.causal:
            raise PlanError(
                f"causal must be {slices.causal}, as the slices say, got {self.causal}; "
                "Documents.masked finds out by itself"
            )
        if len(slices) and max(int(slices.q_stop.max()), int(slices.k_stop.max())) > self.total:
            raise PlanError(
                f"the mask's slices end behind the packed sequence's {self.total} tokens"
            )

    @classmethod
    def of(
        cls, lengths: Iterable[int], *, causal: bool = True, window: int | None = None
    ) -> Documents:
        """Documents of these lengths in tokens, in order; a window of 1 sees the token itself.

        Raises:
            PlanError: a length is negative or not a whole number; a window below 1.
        """
        return cls(_cumulative(lengths), causal, window)

    @classmethod
    def masked(cls, lengths: Iterable[int], slices: Iterable[Slice | Sequence[Any]]) -> Documents:
        """Documents with a mask of their own: any disjoint slices, across documents too.

        Positions and borders are those of the documents; a query sees what the slices show it, and
        nothing else. One that sees nothing has an output of 0 and a log-sum-exp of -inf.

        Args:
            lengths: of the documents, in tokens.
            slices: (q_start, q_stop, k_start, k_stop, kind) in tokens of the packed sequence, kind "full",
                "causal", "inverse_causal" or "band", the latter with low and high; see masks.py.

        Raises:
            PlanError: a length is negative or not a whole number; a slice that is none, that lies
                outside the packed sequence, or that overlaps another one.

        >>> docs = Documents.masked([3, 2], [(0, 3, 0, 3), (3, 5, 0, 5, "causal")])     # a prefix LM
        >>> docs.num_pairs, docs.causal
        (18, False)
        """
        cu = _cumulative(lengths)
        mask = Mask.of(slices, int(cu[-1]))
        return cls(cu, mask.causal, None, mask)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Sequence[int] | np.ndarray | Any,
        *,
        total: int | None = None,
        causal: bool = True,
        window: int | None = None,
    ) -> Documents:
        """Documents from flash-attn's cumulative lengths; `total`, all their tokens, must match.

        Raises:
            PlanError: entries decrease, do not begin with 0, or do not end at `total`.
        """
        docs = cls(cu_seqlens, causal, window)
        if total is not None and docs.total != total:
            relation = "overruns" if docs.total > total else "stops short of"
            raise PlanError(
                f"cu_seqlens {relation} the packed sequence: it ends at {docs.total}, the sequence has "
                f"{total} tokens; its last entry must equal the sequence's length"
            )
        return docs

    @property
    def total(self) -> int:
        """Tokens in the packed sequence."""
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.cu_seqlens)

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs: what attention has to compute."""
        return self.mask.num_pairs

    @cached_property
    def mask(self) -> Mask:
        """What is visible, as slices; without slices of their own one slice for each document.

        >>> [str(one) for one in Documents.of([2, 3], window=2).mask.slices]
        ['queries [0, 2) x keys [0, 2), CAUSAL', 'queries [2, 5) x keys [2, 5), BAND(-1, 0)']
        """
        if self.slices is not None:
            return self.slices
        return Mask.of_documents(self.cu_seqlens, *self.diagonals)

    @property
    def diagonals(self) -> tuple[int, int]:
        """(low, high): a token sees those of its document that are low .. high tokens after it.

        Of documents without slices of their own only.
        """
        before, after = self.window_size or (self.total, 0 if self.causal else self.total)
        return -before, after

    @property
    def prefixes(self) -> bool:
        """Whether every query sees a prefix of its document: no window, no slices."""
        return self.window_size is None and self.slices is None

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

    def _key(self) -> tuple[bytes, bool, int | None, bytes | None]:
        slices = None if self.slices is None else self.slices.key
        return self.cu_seqlens.tobytes(), self.causal, self.window, slices

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        text = ", ".join(map(str, self.lengths[:8]))
        if len(self.lengths) > 8:
            text += f", ... {len(self.lengths)} documents"
        if self.slices is not None:
            slices = self.slices.slices
            shown = ", ".join(str(tuple(one.as_list())) for one in slices[:8])
            more = f", ... {len(slices)} slices" if len(slices) > 8 else ""
            return f"Documents.masked([{text}], slices=[{shown}{more}])"
        window = f", window={self.window}" if self.window is not None else ""
        return f"Documents.of([{text}], causal={self.causal}{window})"


def _cumulative(lengths: Iterable[int]) -> np.ndarray:
    """Cumulative lengths, int64, from lengths in tokens."""
    items = list(lengths)
    sizes = _whole_numbers(items)
    if sizes is None or (sizes < 0).any():
        bad = next((x for x in items if (n := _whole_numbers([x])) is None or n[0] < 0), items)
        raise PlanError(f"document lengths must be whole numbers >= 0, got {bad!r}")
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
