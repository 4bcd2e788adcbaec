"""`supports(...)`: whether something works, or the reason not, before any work is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .documents import Documents
from .heads import split_heads
from .plan import plan


class Support(NamedTuple):
    """The answer of `supports`: true, or false with the reason."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def supports(
    docs: Documents | Iterable[int] = (),
    ranks: int = 1,
    *,
    mask: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    **options: Any,
) -> Support:
    """Whether `plan(docs, ranks, **options)` and attention with these heads work, or the reason not.

    Args:
        mask: a kind of mask; "causal" and "full" are known.
        heads, kv_heads: query heads and key/value heads.

    >>> supports([8], 4, mask="prefix_lm").reason
    "mask 'prefix_lm' is not supported; causal and full are, in a window too (Documents.of)"
    """
    if mask not in (None, "causal", "full"):
        reason = (
            f"mask {mask!r} is not supported; causal and full are, in a window too (Documents.of)"
        )
        return Support(False, reason)
    shared = heads if kv_heads is None else kv_heads
    if heads is not None and (heads < 1 or shared is None or shared < 1 or heads % shared):
        return Support(
            False, f"{heads} query heads are not a multiple of {kv_heads} key/value heads"
        )
    try:
        made = plan(docs, ranks, **options)
        if heads is not None and shared is not None:
            split_heads(heads, shared, made.intra)
    except ValueError as error:
        return Support(False, str(error))
    return Support(True, "yes")
