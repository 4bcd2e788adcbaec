"""Checkpoints of a sharded model and its AdamW: complete or absent, for any number of ranks, no pickle.

    save(folder, step, model, optimizer, metadata)     # folder/step-00000010/: safetensors and note.json
    metadata = load(latest(folder), model, optimizer)  # the model may be sharded over more or fewer ranks

torch.distributed.checkpoint writes each rank's part into step-N.part; when all of it is on disk, one
rename makes it a checkpoint. A run that is killed before then leaves the previous checkpoint as it was. The
metadata have every file's SHA-256, which `load` compares; the ranks divide the files among them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from ...errors import PlanError

METADATA = "note.json"
SCHEMA = 2
KEEP = 2  # older checkpoints are removed
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weight", *MOMENTS)
_ADVICE = "move it away to go on from the one before"


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and the optimiser's moments, by name."""
    tensors: dict[str, Tensor] = {}
    for name, w in model.named_parameters():
        values = {"weight": w.detach(), **optimizer.state[w]}
        tensors |= {f"{kind}.{name}": values[kind] for kind in KINDS}
    return tensors


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    metadata: dict[str, Any],
) -> Path:
    """Write a checkpoint, on all ranks of the default group.

    Args:
        metadata: what else to store, as JSON.
    """
    final, first = folder / f"step-{step:08d}", dist.get_rank() == 0
    part = final.with_suffix(".part")
    if first:
        for old in folder.glob("*.part"):  # of a run that was killed
            shutil.rmtree(old)
        part.mkdir(parents=True)
    dist.barrier()
    writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
    dcp.save(_tensors(model, optimizer), storage_writer=writer)
    dist.barrier()
    sizes = {p.name: p.stat().st_size for p in part.iterdir()} if first else {}
    digests = _digests(part, sizes)
    if first:
        files = {name: [sizes[name], digests[name]] for name in sizes}
        with open(part / METADATA, "w") as file:
            json.dump({"schema": SCHEMA, "step": step, "files": files, **metadata}, file, indent=1)
            os.fsync(file.fileno())
        _sync(part)
        part.rename(final)
        _sync(folder)
        for old in sorted(folder.glob("step-????????"))[:-KEEP]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the files that rank 0 names, on all ranks of the default group; each rank reads its part.

    A file that cannot be read has the error's text instead.
    """
    all_names = [sorted(names)]
    dist.broadcast_object_list(all_names)
    own = {}
    for name in all_names[0][dist.get_rank() :: dist.get_world_size()]:
        try:
            with open(folder / name, "rb") as file:
                own[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            own[name] = str(error)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: digest for part in parts for name, digest in part.items()}


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def latest(folder: Path) -> Path | None:
    """The newest checkpoint of a folder; None where there is none."""
    return max(folder.glob("step-????????"), default=None)


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata that `save` stored, and "step".

    Raises:
        PlanError: an incomplete checkpoint, or something else; nothing is changed.
    """
    try:
        metadata = json.loads((path / METADATA).read_text())
        schema = metadata.get("schema")
        listed = metadata["files"] if schema == SCHEMA else {}
        files = {name: (size, (path / name).stat().st_size) for name, (size, _) in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"checkpoint {path} is torn or none: {error}; {_ADVICE}") from None
    if schema != SCHEMA:
        raise PlanError(f"checkpoint {path} has schema {schema!r}, this version reads {SCHEMA}")
    for name, (size, size_on_disk) in files.items():
        if size_on_disk != size:
            raise PlanError(
                f"checkpoint {path} is torn: {name} has {size_on_disk} of {size} bytes; {_ADVICE}"
            )
    return metadata


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill a model and its AdamW, sharded in any way, from a checkpoint; returns its metadata.

    Raises:
        PlanError: an incomplete or damaged checkpoint, or one of a model with other tensors.
    """
    metadata = read_metadata(path)
    files = metadata["files"]
    digests = _digests(path, files)
    if bad := [name for name, (_, digest) in files.items() if digests[name] != digest]:
        raise PlanError(
            f"checkpoint {path} is damaged: {bad[0]} is not what was written; {_ADVICE}"
        )
    reader = HuggingFaceStorageReader(str(path))
    weights = dict(model.named_parameters())
    ours = {f"{kind}.{n}": list(w.shape) for kind in KINDS for n, w in weights.items()}
    stored = reader.read_metadata().state_dict_metadata
    theirs = {name: list(getattr(x, "size", ())) for name, x in stored.items()}
    if ours != theirs:
        name = next(n for n in sorted({*ours, *theirs}) if ours.get(n) != theirs.get(n))
        raise PlanError(
            f"checkpoint {path} is of another model: {name} is {theirs.get(name, 'absent')} there, "
            f"{ours.get(name, 'absent')} here"
        )
    for w in weights.values():
        step = torch.tensor(float(metadata["step"]))
        optimizer.state[w] = {"step": step, **{m: torch.zeros_like(w) for m in MOMENTS}}
    dcp.load(_tensors(model, optimizer), storage_reader=reader)
    return metadata
