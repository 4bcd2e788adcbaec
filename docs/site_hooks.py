"""What mkdocs asks for when it builds the site: tables of options, recorded figures and tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.main import get_command

from tasp_core.cli.app import app

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

MARK = re.compile(r"^<!-- options of `(.+)` -->$", re.MULTILINE)
STEPS_MARK = "<!-- table of steps.json -->"
RECORDED = Path(__file__).parents[1] / "visualize" / "recorded"


def commands() -> dict[str, Any]:
    """Every command by the words that call it, "fabric up" too.

    >>> "fabric up" in commands(), "plan" in commands()
    (True, True)
    """
    return dict(_walk("", get_command(app)))


def _walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, child in command.commands.items():
        yield from _walk(f"{words} {name}".strip(), child)


def options_table(words: str) -> str:
    """A command's help and its arguments and options as Markdown."""
    command = commands()[words]
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for parameter in command.params:
        names = ", ".join(f"`{name}`" for name in parameter.opts)
        if parameter.param_type_name == "argument":
            names = f"`{parameter.name.upper()}`"
        default = parameter.default
        shown = "" if default in (None, "", False) or parameter.required else f"`{default}`"
        meaning = " ".join(str(getattr(parameter, "help", "") or "").split())
        rows.append(f"| {names} | {shown} | {meaning} |".replace("|  |", "| |"))
    return f"{(command.help or '').strip()}\n\n" + "\n".join(rows)


def steps_table(tables: dict[str, list[dict[str, Any]]]) -> str:
    """Times of SAP with 2 shards of travelling KV, and what no plan can beat, as Markdown."""
    rows = [
        "| sequence, machine | layout | forward ms | over the bound | backward ms | over the bound |"
    ]
    rows.append("|---|---|---|---|---|---|")
    for name in ("buffers, balanced", "buffers, contiguous", "long"):
        for row in tables[name]:
            if row["varied"] == "2 shards":
                cells = [
                    f"{row['distribution']} {row['tokens'] >> 10}K, {row['machine']}",
                    row["layout"],
                ]
                for one in (row["forward"], row["backward"]):
                    cells += [f"{one['total_s'] * 1e3:.2f}", f"{one['over_bound']:.3f}"]
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the recorded figures that pages show."""
    from mkdocs.structure.files import File  # only the site's builder has it

    for name in ("steps.svg",):
        files.append(File.generated(config, f"recorded/{name}", abs_src_path=str(RECORDED / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the tables that a page asks for."""
    if STEPS_MARK in markdown:
        tables = json.loads((RECORDED / "steps.json").read_text(encoding="utf-8"))["tables"]
        markdown = markdown.replace(STEPS_MARK, steps_table(tables))
    return MARK.sub(lambda mark: options_table(mark[1]), markdown)
