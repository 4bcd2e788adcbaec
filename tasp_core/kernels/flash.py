"""Flash kernels for packed sequences, behind one signature.

    kernel = find("flash")    # the best flash-attn; or "aten", "flash2", "flash3", "flash4"
    out, lse = kernel.forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale)

q_THD, k_TKD, v_TKE, out_THE, lse_TH (T tokens, H heads, K kv heads, D, E head dims); cu_*: int32.
backward takes the FINAL out and lse of each row, so gradients of disjoint keys add up exactly.
Causal sequences are square: which corner a kernel aligns its mask to does not matter. Windows come
as squares too (tiles.py). Not covered: padding of head dims, dropout, empty sequences, CPU tensors.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Layout = Literal["HT", "TH", "BHM"]  # of lse; BHM: [sequences, heads, longest], padded at the end

# What kernels call our values. Versions are told apart by these names, never by number.
_NAMES = {
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "dout": ("dout", "grad_out"),
    "cu_q": ("cu_seqlens_q", "cum_seq_q"),
    "cu_k": ("cu_seqlens_k", "cum_seq_k"),
    "max_q": ("max_seqlen_q", "max_q"),
    "max_k": ("max_seqlen_k", "max_k"),
    "causal": ("causal", "is_causal"),
    "scale": ("softmax_scale", "scale"),
    "out": ("out",),
    "lse": ("softmax_lse", "lse", "logsumexp"),
    "seed": ("rng_state",),
}
_FORWARD = ("q", "k", "v", "cu_q", "cu_k", "causal", "scale")
_BACKWARD = (*_FORWARD, "dout", "out", "lse")
_IF_TAKEN = ("max_q", "max_k", "return_lse", "deterministic", "dq", "dk", "dv", "seed", "unused")
# Given only where a kernel has no default of its own: every feature switched off.
_OFF = {
    "dropout_p": 0.0,
    "softcap": 0.0,
    "return_softmax": False,
    "return_debug_mask": False,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
} | dict.fromkeys(
    (
        "out",
        "alibi_slopes",
        "block_table",
        "page_table",
        "k_new",
        "v_new",
        "qv",
        "seqused_q",
        "seqused_k",
        "sequed_q",
        "sequed_k",
        "cu_seqlens_k_new",
        "kv_batch_idx",
        "leftpad_k",
        "rotary_cos",
        "rotary_sin",
        "seqlens_rotary",
        "q_descale",
        "k_descale",
        "v_descale",
    )
)


def bind(function: Any, roles: tuple[str, ...], label: str) -> Callable[..., Any]:
    """The function under our names for its parameters; values it does not take are dropped.

    Raises ValueError if it lacks a value that we must pass, or demands one that we do not know.
    """
    if isinstance(function, torch._ops.OpOverload):
        takes = {a.name: not a.has_default_value() for a in function._schema.arguments}
    else:  # a torch.library.custom_op shows only (*args, **kwargs); `_init_fn` is behind it
        parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters.values()
        takes = {p.name: p.default is p.empty for p in parameters if "VAR" not in p.kind.name}
    names: dict[str, str] = {}
    for role in (*roles, *_IF_TAKEN):
        names.update((role, name) for name in _NAMES.get(role, (role,)) if name in takes)
    if missing := [_NAMES[role][0] for role in roles if role not in names]:
        raise ValueError(f"{label} takes no {', '.join(missing)}: install another version of it")
    others = [name for name, must in takes.items() if must and name not in names.values()]
    if unknown := [name for name in others if name not in _OFF]:
        raise ValueError(f"{label} demands {', '.join(unknown)}, unknown: install another version")
    fixed = {name: _OFF[name] for name in others}
    return lambda **ours: function(**{names[r]: ours[r] for r in ours if r in names}, **fixed)


def layouts_of(lse: Tensor, tokens: int, heads: int) -> list[Layout]:
    """The layouts in which a kernel's lse can be read; two of them where T == H."""
    if lse.dim() != 2:
        return ["BHM"] if lse.dim() == 3 and lse.shape[1] == heads else []
    layouts: list[Layout] = ["TH"] if lse.shape == (tokens, heads) else []
    return [*layouts, "HT"] if lse.shape[0] == heads and lse.shape[1] >= tokens else layouts


def lse_rows(
    lse: Tensor, tokens: int, heads: int, cu: Tensor | None = None, *, order: Layout | None = None
) -> Tensor:
    """The lse as [T, H] float32, from any layout in use; padding at the end is dropped.

    Raises ValueError if it does not fit, if T == H without `order`, or for BHM without `cu`.
    >>> lse_rows(torch.ones(2, 128), tokens=5, heads=2).shape
    torch.Size([5, 2])
    """
    if lse.dim() == 3 and lse.shape[0] == 1:
        lse, order = lse[0], "HT"
    layouts = layouts_of(lse, tokens, heads)
    fitting = [layout for layout in layouts if order in (None, layout)]
    if len(fitting) != 1 or (fitting == ["BHM"] and (cu is None or len(cu) != len(lse) + 1)):
        raise ValueError(
            f"log-sum-exp of shape {tuple(lse.shape)} for {tokens} tokens and {heads} heads; possible "
            f"layouts are {layouts}, asked for {order}: pass order='TH' or 'HT', and for BHM also its cu"
        )
    if fitting == ["BHM"] and cu is not None:
        return lse[_blocks(cu, tokens)].float()
    return (lse if fitting == ["TH"] else lse[:, :tokens].t()).float()


def lse_for(lse_TH: Tensor, layout: Layout, cu: Tensor, max_q: int) -> Tensor:
    """The inverse of `lse_rows`: lse [T, H] in the layout that the kernel reads, float32, contiguous.

    Args:
        layout: "TH", "HT", or "BHM": [sequences, H, max_q].
        cu: of the sequences; max_q: rows of the longest.
    """
    if layout != "BHM":
        return (lse_TH if layout == "TH" else lse_TH.t()).float().contiguous()
    # +inf where there is no row: exp(score - inf) = 0, should the kernel read there
    lse = torch.full((len(cu) - 1, lse_TH.shape[1], max_q), torch.inf, device=lse_TH.device)
    lse[_blocks(cu, len(lse_TH))] = lse_TH.float()
    return lse


def _blocks(cu: Tensor, tokens: int) -> tuple[Tensor, slice, Tensor]:
    """Index of the rows in [sequences, H, longest]; `output_size` spares a wait for the device."""
    sequence = torch.repeat_interleave(cu[1:] - cu[:-1], output_size=tokens)
    return sequence, slice(None), torch.arange(tokens, device=cu.device) - cu[sequence]


def normalise_empty(out: Tensor, lse: Tensor, empty_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Copies with out 0 and lse -inf where the mask [T] says so: our convention."""
    empty = empty_rows[:, None]
    return out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)


class Varlen:
    """One flash kernel; subclasses say where its functions are, and its limits."""

    name: ClassVar[str]
    module: ClassVar[str]
    functions: ClassVar[tuple[str, str]]
    majors: ClassVar[dict[str, range]] = {"cuda": range(8, 100), "rocm": range(100)}  # of devices
    fills: ClassVar[bool] = True  # backward writes into gradients that it is given
    max_head_dim: ClassVar[int] = 256
    stable_head_dim: ClassVar[int] = 256  # the largest one with a deterministic backward
    head_dim_multiple: ClassVar[int] = 8
    unequal_dims: ClassVar[bool] = False  # may the head dim of v differ from that of q and k?

    def __init__(self, *, deterministic: bool = True) -> None:
        self.deterministic = deterministic  # repeatable bits, for more memory and time
        self.layout: Layout | None = None  # of lse: versions differ, so it is learned from outputs
        forward, backward = self.functions
        self._forward = bind(self.lookup(forward), _FORWARD, forward)
        self._backward = bind(self.lookup(backward), _BACKWARD, backward)

    def lookup(self, function: str) -> Any:
        """The kernel's function of that name."""
        return getattr(importlib.import_module(self.module), function)

    def is_deterministic(self, head_dim: int) -> bool:
        """Whether backward asks for repeatable bits; False where the kernel would refuse."""
        return self.deterministic and head_dim <= self.stable_head_dim

    def _around(self, q: Tensor, deterministic: bool) -> AbstractContextManager[dict[str, Tensor]]:
        return nullcontext({})

    def _rows(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        dims, step = [x.shape[-1] for x in tensors], self.head_dim_multiple
        if not set(dims) <= set(range(step, self.max_head_dim + 1, step)):
            takes = f"{self.name} takes head dims up to {self.max_head_dim} in steps of {step}"
            raise ValueError(f"{takes}; found {dims}: pad them, or use another kernel")
        return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)

    def _probe(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Layout:
        """Learn the layout of lse from a call whose token and head counts differ."""
        n = 1 if q.shape[1] > 1 else 2
        q, k, v = (x.new_zeros(n, *x.shape[1:]) for x in (q, k, v))
        cu = torch.tensor([0, n], dtype=torch.int32, device=q.device)
        self.forward(q, k, v, cu, cu, n, n, False, scale)
        return self.layout or "HT"

    @torch.no_grad()
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, E] in q's dtype, lse [T, H] float32)."""
        q, k, v = self._rows(q, k, v)
        # max_q = 1 would send flash-attn 2 down its decoding path, which wants one row a sequence
        result = self._forward(
            q=q,
            k=k,
            v=v,
            cu_q=cu_q,
            cu_k=cu_k,
            max_q=max(max_q, 2),
            max_k=max_k,
            causal=causal,
            scale=scale,
            return_lse=True,
        )
        out, lse = result[0], result[5 if len(result) == 8 else 1]  # 8 values: flash-attn < 2.7
        layouts: list[Layout] = layouts_of(lse, *q.shape[:2]) or ["HT"]
        self.layout = (
            layouts[0] if len(layouts) == 1 else self.layout or self._probe(q, k, v, scale)
        )
        return out, lse_rows(lse, q.shape[0], q.shape[1], cu_q, order=self.layout)

    @torch.no_grad()
    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) through these keys, given the final `out` and `lse` of every query row."""
        q, k, v, dout, out = self._rows(q, k, v, dout.to(q.dtype), out.to(q.dtype))
        layout, max_q = self.layout or self._probe(q, k, v, scale), max(max_q, 2)
        like = (("dq", q), ("dk", k), ("dv", v)) if self.fills else ()
        grads = {name: x.new_empty(x.shape) for name, x in like}
        deterministic = self.is_deterministic(max(q.shape[-1], v.shape[-1]))
        with self._around(q, deterministic) as seeds:
            result = self._backward(
                dout=dout,
                q=q,
                k=k,
                v=v,
                out=out,
                lse=lse_for(lse, layout, cu_q, max_q),
                cu_q=cu_q,
                cu_k=cu_k,
                max_q=max_q,
                max_k=max_k,
                causal=causal,
                scale=scale,
                deterministic=deterministic,
                **grads,
                **seeds,
            )
        dq, dk, dv = grads.values() if self.fills else result[:3]
        return dq, dk, dv


class AtenFlash(Varlen):
    """torch's own flash kernels, on CUDA and ROCm."""

    name, fills = "aten", False
    functions = ("_flash_attention_forward", "_flash_attention_backward")

    def lookup(self, function: str) -> Any:
        return getattr(torch.ops.aten, function).default

    @contextmanager
    def _around(self, q: Tensor, deterministic: bool) -> Iterator[dict[str, Tensor]]:
        """torch takes this flag from the whole process: set it for the call, then put it back."""
        # without dropout no kernel reads the seed, but its dtype and shape have to be right
        hip, mode = torch.version.hip is not None, torch.get_deterministic_debug_mode()
        seeds = torch.zeros(2, dtype=torch.int64 if hip else torch.uint64, device=q.device)
        torch.set_deterministic_debug_mode(2 if deterministic else mode)
        try:
            yield {"seed": seeds[0] if hip else seeds, "unused": seeds[1]}
        finally:
            torch.set_deterministic_debug_mode(mode)


class Flash2(Varlen):
    """flash-attn 2.4 and later, on CUDA and ROCm (composable kernels or Triton)."""

    name, module = "flash2", "flash_attn.flash_attn_interface"
    functions = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")


class Flash3(Varlen):
    """flash-attn 3 (its `hopper` folder); older builds ignore the deterministic flag."""

    name, module = "flash3", "flash_attn_interface"
    functions = ("_flash_attn_forward", "_flash_attn_backward")
    majors: ClassVar = {"cuda": range(9, 10)}
    stable_head_dim = 192


class Flash4(Varlen):
    """flash-attn 4 (CuTe). On compute capability 12.x it refuses to be deterministic."""

    name, module, fills = "flash4", "flash_attn.cute.interface", False
    functions = ("_flash_attn_fwd", "_flash_attn_bwd")
    majors: ClassVar = {"cuda": range(10, 100)}
    max_head_dim, head_dim_multiple = 128, 64  # others have had a wrong backward, or none

    def is_deterministic(self, head_dim: int) -> bool:
        return self.deterministic and (_device() or ("", 0, 0))[1] != 12


_ADAPTERS: dict[str, type[Varlen]] = {a.name: a for a in (AtenFlash, Flash2, Flash3, Flash4)}


def _device() -> tuple[str, int, int] | None:
    """("cuda" or "rocm", major, minor) of the current device; asking starts CUDA."""
    kind = "rocm" if torch.version.hip else "cuda"
    return (kind, *torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


def available(device_type: str) -> dict[str, str]:
    """For each adapter "ok", or one line that says why it cannot be used; never raises.

    >>> available("cpu")["aten"]
    "needs a CUDA or ROCm device, found none of type 'cpu'"
    """
    states, device = {}, _device() if device_type == "cuda" else None
    for name, adapter in _ADAPTERS.items():
        if device is None:
            states[name] = f"needs a CUDA or ROCm device, found none of type {device_type!r}"
        elif device[1] not in adapter.majors.get(device[0], ()):
            states[name] = "not made for {} devices of version {}.{}".format(*device)
        else:
            try:
                adapter()
                states[name] = "ok"
            except Exception as error:  # a broken installation can raise anything
                states[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return states


def best(device_type: str) -> str | None:
    """The newest flash-attn that can be used: 4 on compute capability >= 10, 3 on 9.x, else 2."""
    states = available(device_type)
    return next((name for name in ("flash4", "flash3", "flash2") if states[name] == "ok"), None)


def find(name: str) -> Varlen:
    """The adapter of that name, for "flash" the best; a ValueError says why there is none."""
    chosen, states = best("cuda") if name == "flash" else name, available("cuda")
    if chosen is None or states.get(chosen) != "ok":
        reasons = "; ".join(f"{n}: {state}" for n, state in states.items())
        raise ValueError(f"asked for kernel {name!r}; found {reasons}: install it, or use another")
    return _ADAPTERS[chosen]()
