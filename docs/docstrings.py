"""Docstrings -> what the API reference reads (an extension of griffe, which mkdocstrings calls).

Doctests become code blocks: Markdown would take `>>>` for quotations. Griffe compares the names of
arguments with the signature, so "heads, kv_heads: ..." and "batch: ... overlap: ..." on one line become
an entry for each name.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n.+)*(?:\n\n?>>> .*(?:\n.+)*)*", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {8}.*)*)$", re.MULTILINE)
NEXT = re.compile(r"(?<=\.) (?=[a-z_]+: )")  # "batch: rows. overlap: whether ...": a new entry


def markdown(text: str) -> str:
    """A docstring as mkdocstrings should read it."""
    text = DOCTEST.sub(lambda run: f"```pycon\n{run[0]}\n```", text)
    arguments, *rest = re.split(r"^(?=Raises:|Returns:)", text, maxsplit=1, flags=re.MULTILINE)
    summary, *entries = re.split(
        r"^(?=Args:|Attributes:)", arguments, maxsplit=1, flags=re.MULTILINE
    )
    return (
        summary
        + "".join(ENTRY.sub(_entries, NEXT.sub("\n    ", x)) for x in entries)
        + "".join(rest)
    )


def _entries(entry: re.Match[str]) -> str:
    return "\n".join(f"    {name}: {entry[2]}" for name in entry[1].split(", "))


class DoctestBlocks(griffe.Extension):
    """Called for each object whose docstring is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the docstring's text."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
