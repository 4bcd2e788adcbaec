"""Activation checkpointing that does not run attention, and its messages, a second time.

    checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)
    model.gradient_checkpointing_enable(                       # transformers
        {"use_reentrant": False, "context_fn": keep_attention})

Within the region every `tasp.attention` keeps its result and what its backward pass needs (q, k, v, out,
lse); all else is recomputed. Without `keep_attention` checkpointing is right too, and exchanges again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Region:
    """Results of a checkpointed region's attention calls, in the order of the calls."""

    def __init__(self) -> None:
        self.results: list[list[tuple[Tensor, bool]]] = []
        self.replayed: Iterator[list[tuple[Tensor, bool]]] | None = None  # None: the first run

    @contextmanager
    def enter(self, *, replay: bool) -> Iterator[None]:
        self.replayed = iter(self.results) if replay else None
        token = _region.set(self)
        try:
            yield
        finally:
            _region.reset(token)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.replayed is not None:
            kept = next(self.replayed)
            result = tuple(x.detach().requires_grad_(wanted) for x, wanted in kept)
        else:
            # hooks that do nothing hide the checkpoint's: what attention saves stays saved
            with saved_tensors_hooks(Tensor.detach, lambda x: x):
                out = fn(*args, **kwargs)
            result = out if isinstance(out, tuple) else (out,)
            # without their graph, which would hold this region, which would hold them
            self.results.append([(x.detach(), x.requires_grad) for x in result])
        return result if len(result) > 1 else result[0]


_region: ContextVar[_Region | None] = ContextVar("tasp_region", default=None)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of torch's non-reentrant checkpoint: contexts of the first run and of the second."""
    region = _Region()
    return region.enter(replay=False), region.enter(replay=True)


def once(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fn(*args, **kwargs), or what it returned before when a kept region is recomputed."""
    region = _region.get()
    return fn(*args, **kwargs) if region is None else region.run(fn, args, kwargs)


def opaque() -> Callable[..., Any]:
    """`once` as torch.compile must take it: called as it is, not traced.

    Tracing would follow exchanges and kernels into code that it changes or cannot run.
    """
    return torch.compiler.disable(once)
