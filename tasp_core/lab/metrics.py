"""A run's metrics: one JSON object a line, in a file that goes on where a resumed run does."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

EVERY_S = 10.0  # between two lines for people


class Metrics:
    """Appends to metrics.jsonl and prints a line now and then; does nothing on ranks but the first."""

    def __init__(self, path: Path, step: int, *, speaks: bool) -> None:
        """Drop what a killed run wrote after `step`: it will be written again."""
        self.path, self.speaks, self.said = path, speaks, -EVERY_S
        if speaks:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [text for text in _lines(path) if json.loads(text)["step"] <= step]
            part = path.with_suffix(".part")
            part.write_text("".join(f"{text}\n" for text in kept))
            part.replace(path)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line of the file."""
        if self.speaks:
            with open(self.path, "a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")

    def say(self, text: str, *, now: bool = True) -> None:
        """A line for people; unless `now`, only when the last is old."""
        if self.speaks and (now or time.monotonic() - self.said >= EVERY_S):
            print(text, flush=True)
            self.said = time.monotonic()


def _lines(path: Path) -> list[str]:
    """Whole lines; a killed run may have left half of one."""
    text = path.read_text() if path.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def read(path: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The lines of one kind, in order."""
    return [line for line in map(json.loads, _lines(path)) if line["kind"] == kind]
