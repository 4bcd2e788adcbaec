"""Activation checkpointing that does not repeat attention or its messages.

    checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)
    model.gradient_checkpointing_enable(                       # transformers
        {"use_reentrant": False, "context_fn": keep_attention})

Within the region every `tasp.attention` keeps its result and what its backward pass needs (q, k, v, out,
lse); everything else is recomputed. Tensors that are kept must not be changed in place afterwards: that
raises, as it does in autograd. Without `keep_attention` checkpointing is right too, but exchanges again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Kept:
    """A tensor that an attention call keeps, and the version that it had then."""

    def __init__(self, tensor: Tensor, call: int) -> None:
        # without its graph, which would hold the region, which would hold this; memory and version shared
        self.tensor, self.call, self.wants_grad = tensor.detach(), call, tensor.requires_grad
        self.version = None if tensor.is_inference() else tensor._version

    def unchanged(self, names: dict[tuple[int, ...], str]) -> Tensor:
        """The tensor.

        Args:
            names: what the call's arguments and results are called, by `_place`.

        Raises:
            RuntimeError: it was changed in place.
        """
        x = self.tensor
        if self.version is None or x._version == self.version:
            return x
        name = names.get(_place(x), "a tensor computed from q, k and v")
        raise RuntimeError(
            "one of the tensors that keep_attention keeps for the backward pass has been changed by an "
            f"inplace operation: {name} of attention call {self.call} of this checkpointed region, "
            f"{x.dtype} {list(x.shape)}, is at version {x._version}; expected version {self.version} "
            "instead. It, or a tensor that shares its memory, was changed after the call. Change a copy "
            "(v = v.clone()), or compute a new tensor (out = out * 2 for out.mul_(2))."
        )


def _place(x: Tensor) -> tuple[int, ...]:
    return x.data_ptr(), x.numel()


class _Region:
    """Results of a checkpointed region's attention calls, in the order of the calls."""

    def __init__(self) -> None:
        self.results: list[tuple[list[_Kept], dict[tuple[int, ...], str]]] = []
        self.next: int | None = None  # the call that comes next in a run after the first

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._first(fn, args, kwargs) if self.next is None else self._again(self.next)
        return result if len(result) > 1 else result[0]

    def _first(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        call, names = len(self.results), dict[tuple[int, ...], str]()
        for name, x in zip("qkv", args, strict=False):
            if isinstance(x, Tensor):
                names.setdefault(_place(x), name)
        # hooks of our own hide the checkpoint's: what attention saves stays saved
        with saved_tensors_hooks(lambda x: _Kept(x, call), lambda kept: kept.unchanged(names)):
            out = fn(*args, **kwargs)
        result = out if isinstance(out, tuple) else (out,)
        for name, x in zip(("out", "lse"), result, strict=False):
            names.setdefault(_place(x), name)
        self.results.append(([_Kept(x, call) for x in result], names))
        return result

    def _again(self, call: int) -> tuple[Tensor, ...]:
        if call >= len(self.results):
            raise RuntimeError(
                f"a checkpointed region under keep_attention calls attention {len(self.results)} times "
                "in its first run and once more when it is recomputed; both runs must be the same"
            )
        self.next = call + 1
        kept, names = self.results[call]
        return tuple(k.unchanged(names).detach().requires_grad_(k.wants_grad) for k in kept)


_region: ContextVar[_Region | None] = ContextVar("tasp_region", default=None)


class _Run(AbstractContextManager[None]):
    """The first run of a region, or a recomputation; each backward pass over a kept graph recomputes."""

    def __init__(self, region: _Region, *, first: bool) -> None:
        self.region, self.first = region, first
        self.tokens: list[Token[_Region | None]] = []

    def __enter__(self) -> None:
        self.region.next = None if self.first else 0
        self.tokens.append(_region.set(self.region))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _region.reset(self.tokens.pop())


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of torch's non-reentrant checkpoint: contexts of the first run and of the second.

    Raises:
        RuntimeError: in the backward pass, where q, k, v, out or lse of an attention call was changed in
            place after the call.
    """
    region = _Region()
    return _Run(region, first=True), _Run(region, first=False)


def run_or_recall(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fn(*args, **kwargs); where a region under keep_attention is recomputed, its first result."""
    region = _region.get()
    return fn(*args, **kwargs) if region is None else region.run(fn, args, kwargs)


def opaque() -> Callable[..., Any]:
    """`run_or_recall` for torch.compile: called as it is, not traced.

    Tracing would enter exchanges and kernels, code that it changes or cannot run.
    """
    return torch.compiler.disable(run_or_recall)
