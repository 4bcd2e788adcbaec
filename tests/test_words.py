"""The reader is an engineer of this field: none of the words that only this project once used are left.

    python tests/test_words.py tasp_core/sequence README.md       # lists what is wrong there

docs/glossary.md defines the words that are used instead.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = sorted((ROOT / "tasp_core").rglob("*.py"))
# what a user reads: documentation, and what figures and the course are made of
PROSE = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "visualize").glob("*.py")),
    *sorted((ROOT / "notebooks" / "src").glob("*.py")),
    *sorted((ROOT / "notebooks" / "tasp_course").glob("*.py")),
]

# In names, comments, docstrings, errors and figures: a word of its own, or a part of a name (a_guest_row).
PRIVATE = {
    "guest": "remote query",
    "guests": "remote queries",
    "welcome": "unpack",
    "arena": "KV receive buffer",
    "parcel": "packed message",
    "parcels": "packed messages",
    "landing": "gradient receive buffer",
    "mirrored": "inverse causal",
    "mate": "node peer",
    "mates": "node peers",
    "twin": "duplicated chunk",
    "complaint": "validation error",
    "salt": "tag prefix",
    "settle": "finish handshake",
    "settled": "finished",
    "promise": "declared limits",
    "promised": "declared",
    "promises": "declares",
    "recipe": "spec",
    "judge": "reference, compare",
    "heldout": "evaluation",
    "baton": "lock",
}
# As a name of its own: says nothing about the thing that is named.
VAGUE = {
    "found", "given", "some", "whole", "wide", "once", "word", "words", "way", "ways", "away", "meets",
    "note", "held", "alike", "plain", "uneven", "inner", "acc", "answers", "gate", "fan", "pace", "feed",
    "meter", "world", "Silent", "Quiet", "Virtual", "Board",
}  # fmt: skip
# Public names and standard terms that stay.
STAYS = {
    ("plan_file.py", "promise"),  # a key of plan files that earlier versions wrote
    ("Errors", "plain"),  # errors of the plain kernel, in result files too
    ("Goal", "found"),  # in result files
}
# the first column of docs/moved.md: modules as they were called
OLD_PATHS = re.compile(r"^\| `[^|]*\|")
PER = re.compile(
    r"\b(steps?|shares?|tokens?|bytes|messages?|ranks|hops?|calls?|seconds|time|rows?|queries|documents?|pairs"
    r"|lines?|NICs?|kernels?|samples?|runs?|processes|objects?|ms|GB|MB)"
    r" an? (rank|link|step|node|pass|document|core|share|token|NIC|message|call|second|query|layer|line"
    r"|run)\b"
)


def _parts(name: str) -> set[str]:
    """The words of a name: kv_landing_rows, KvLanding."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return {part.lower() for part in spaced.split("_")}


def _texts(source: str) -> Iterator[tuple[int, str]]:
    """Comments and strings, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(
            tokenize, "FSTRING_MIDDLE", -1
        ):
            yield token.start[0], token.string


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that the file gives to things: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def offences(path: Path) -> list[str]:
    """What a file says in words that are not the field's, a line each."""
    text, rows = path.read_text(encoding="utf-8"), []
    lines = text.splitlines()
    if path.name == "moved.md":
        lines = [OLD_PATHS.sub("", line) for line in lines]
    prose = [*enumerate(lines, 1)] if path.suffix != ".py" else [*_texts(text)]
    for line, string in prose:
        for name in re.findall(r"[A-Za-z_][A-Za-z_0-9]*", string):
            rows += [
                (line, f"{name}: say {PRIVATE[p]}")
                for p in _parts(name) & PRIVATE.keys()
                if (path.name, name) not in STAYS
            ]
        rows += [(line, f"{m[0]}: say per") for m in PER.finditer(string)]
    if path.suffix == ".py" and path in CODE:
        tree = ast.parse(text)
        stays = {
            (child.lineno, child.target.id)
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for child in node.body
            if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
            if (node.name, child.target.id) in STAYS
        }
        for line, name in _names(tree):
            if (line, name) in stays:
                continue
            rows += [(line, f"{name}: say {PRIVATE[p]}") for p in _parts(name) & PRIVATE.keys()]
            if name.lstrip("_") in VAGUE:
                rows.append((line, f"{name}: name the thing"))
    where = path.relative_to(ROOT)
    return [f"{where}:{line}: {what}" for line, what in dict.fromkeys(sorted(rows))]


@pytest.mark.parametrize("path", [*CODE, *PROSE], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_words(path):
    assert offences(path) == []


if __name__ == "__main__":
    for asked in map(Path, sys.argv[1:]):
        asked = ROOT / asked
        for one in sorted(asked.rglob("*.py")) if asked.is_dir() else [asked]:
            print("\n".join(offences(one)), end="\n" if offences(one) else "")
