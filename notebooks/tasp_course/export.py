"""Execute notebooks, and write them as HTML pages and slides, together with the teacher's kit.

HTML pages show every figure without a server. Slides load reveal.js and require.js from the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter, SlidesExporter

from .kit import teachers_kit
from .sources import HERE, KINDS, units

LIMIT_S = 60


def execute(nb: Any, folder: Path, *, limit_s: int = LIMIT_S) -> Any:
    """The notebook, executed in a folder. Of a widget the SVG is kept, not its state.

    Args:
        limit_s: seconds that one cell may take.

    Raises:
        CellExecutionError: a cell without the tag `raises-exception` raised.
    """
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(nb, timeout=limit_s, store_widget_state=False, resources=resources)
    return client.execute()


def to_html(executed: Any) -> str:
    """An executed notebook as an HTML page."""
    options = {"template_name": "course", "extra_template_basedirs": [str(HERE / "templates")]}
    return str(HTMLExporter(**options).from_notebook_node(executed)[0])


def export(stems: list[str]) -> Iterator[Path]:
    """Write the pages of these units, the index and the kit; yield each path once it is written."""
    to = HERE / "html"
    for path in [HERE / kind / f"{stem}.ipynb" for stem in stems for kind in KINDS]:
        executed = execute(nbformat.read(path, as_version=4), path.parent)
        yield _write(to / path.parent.name / f"{path.stem}.html", _linked(to_html(executed)))
        if path.parent.name == "solved":
            deck = SlidesExporter(reveal_scroll=True).from_notebook_node(executed)[0]
            yield _write(to / "slides" / f"{path.stem}.slides.html", deck)
    index = execute(nbformat.read(HERE / "index.ipynb", as_version=4), HERE)
    yield _write(to / "index.html", _linked(to_html(index)))
    yield _write(to / "teacher.md", teachers_kit(units()))


def _linked(page: str) -> str:
    """The page, with links to HTML pages in place of links to notebooks."""
    return re.sub(r'href="([^":]+)\.ipynb"', r'href="\1.html"', page)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
