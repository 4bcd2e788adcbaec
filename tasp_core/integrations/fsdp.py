"""FSDP2, DDP and DeviceMesh around sequence parallelism, under one rule: gradients ADD UP over ranks.

    mesh = init_device_mesh("cuda", (dp, sp), mesh_dim_names=("dp", "sp"))
    group, everyone = mesh["sp"].get_group(), flat(mesh, "dp", "sp")
    shard_parameters(model, model.blocks, everyone)      # FSDP2 over dp x sp
    total, count = tasp.token_loss(logits, labels, everyone.get_group())   # count: of all rows
    (total / count.clamp(min=1)).backward()              # the gradient of one process with all the rows

A row lives on one sp group; each dp index has its own. With DDP: `add_up(DistributedDataParallel(model))`.
Whoever keeps a wrapper's averaging multiplies the loss by the wrapper's world size instead. A third axis
(tp) needs nothing here: pass `mesh["sp"].get_group()` to attention.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def flat(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """The named axes of a mesh as one axis, e.g. all ranks that share parameters."""
    return mesh[axes]._flatten("_".join(axes)) if len(axes) > 1 else mesh[axes[0]]


def shard_parameters(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> FSDPModule:
    """Shard parameters, gradients and optimiser states over `mesh` with FSDP2; gradients add up.

    Args:
        blocks: the parts to gather one at a time, usually the layers; the rest is gathered as a whole.
        mesh: one axis; every rank has its own tokens (dp x sp flattened, see `flat`).
        dtype: of computation and gathered parameters (bfloat16: mixed precision); gradients are
            reduced in float32. None: the parameters' own.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None, cast_forward_inputs=False
    )
    for part in (*blocks, model):
        wrapped = fully_shard(
            part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
        )
        wrapped.set_gradient_divide_factor(1.0)  # a sum, not a mean
        wrapped.set_force_sum_reduction_for_comms(True)  # PREMUL_SUM is NCCL's only
    return wrapped


def add_up(model: DistributedDataParallel) -> DistributedDataParallel:
    """Make DDP add gradients up instead of averaging them; returns the same wrapper."""

    def total(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), group=model.process_group, async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    # a lambda: DDP compares annotations with classes, and ours are strings
    model.register_comm_hook(None, lambda _, bucket: total(bucket))
    return model
