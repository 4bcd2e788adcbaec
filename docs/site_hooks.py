"""What mkdocs asks for when it builds the site: the tables of options on the page of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from tasp_core.cli.app import app

MARK = re.compile(r"^<!-- options of `(.+)` -->$", re.MULTILINE)


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


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the tables that a page asks for."""
    return MARK.sub(lambda mark: options_table(mark[1]), markdown)
