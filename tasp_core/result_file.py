"""Result files: one JSON file per run, with schema version, configuration and environment."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .errors import PlanError

SCHEMA = 1


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code: versions, processor, cores; no host names, no paths."""
    packages: dict[str, str | None] = {}
    for name in ("torch", "numpy", "networkx", "flash-attn"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "packages": packages,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def write(path: Path, kind: str, **body: Any) -> None:
    """Write one run's result; folders are made, and an old file is replaced in one rename."""
    data = {"schema": SCHEMA, "kind": kind, "environment": environment(), **body}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def read(path: Path, kind: str) -> dict[str, Any]:
    """A run's result as `write` left it.

    Raises:
        PlanError: there is no such file, or it has another schema or kind.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read the result file {path}: {error}") from None
    head = data if isinstance(data, dict) else {}
    if (head.get("schema"), head.get("kind")) != (SCHEMA, kind):
        raise PlanError(
            f"{path} has schema {head.get('schema')!r} and kind {head.get('kind')!r}, "
            f"wanted are {SCHEMA} and {kind!r}"
        )
    return data
