"""Widgets and figures in a real JupyterLab: `make test-browser`. Not part of `make test`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab import Lab, errors, figure, move_slider, run_all, shoot

pytestmark = pytest.mark.browser

CELLS = (
    "import tasp_core as tasp\nfrom visualize import hops\nfrom visualize.widgets import explore_rings",
    "explore_rings(ranks=5)",
    "hops(tasp.plan([64], 4, schedule='ring'))",
)


def notebook(folder: Path, cells: tuple[str, ...]) -> str:
    """Write a notebook with these cells; return its name."""
    code = [
        {
            "cell_type": "code",
            "id": f"c{i}",
            "source": text,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for i, text in enumerate(cells)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    content = {
        "cells": code,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (folder / "scratch.ipynb").write_text(json.dumps(content))
    return "scratch.ipynb"


def test_a_slider_changes_the_figure_and_errors_take_its_place(tmp_path):
    with Lab(tmp_path) as lab, lab.page(notebook(tmp_path, CELLS)) as page:
        run_all(page)
        page.wait_for_selector(".widget-html-content svg")
        assert "tasp on 5 ranks" in figure(page)
        shoot(page, "widget-before")
        move_slider(page, 0)
        assert "tasp on 6 ranks" in figure(page)
        page.locator(".widget-dropdown select").first.select_option("tasp_paths")
        page.wait_for_selector(".widget-html-content [role=alert]")
        assert "need at least 2 nodes" in figure(page)
        shoot(page, "widget-error")
        move_slider(page, 1)
        assert "2 nodes" in figure(page)
        shoot(page, "widget-after")
        page.locator(".js-plotly-plot").scroll_into_view_if_needed()
        page.wait_for_selector(".js-plotly-plot .slider-group")
        shoot(page, "plotly")
        assert not errors(page)
