"""Exported HTML shows every figure without a server, a kernel or a network: `make test-browser`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lab import ROOT, browser_page, shoot
from test_lab_widgets import notebook

pytestmark = pytest.mark.browser

CELLS = (
    "import tasp_core as tasp\nfrom visualize import *\nfrom visualize.widgets import *",
    "mask(tasp.plan([640, 90], 4))",
    "hops(tasp.plan([64], 4, schedule='ring'), step=1)",
    "explore_mask()",
)
# without a stored widget state, the SVG of each widget is shown
EXPORT = (
    "--execute",
    "--to",
    "html",
    "--ExecutePreprocessor.store_widget_state=False",
    "--template=course",
    f"--TemplateExporter.extra_template_basedirs={ROOT}/notebooks/templates",
)


def test_exported_figures_are_visible_without_a_server(tmp_path):
    name = notebook(tmp_path, CELLS)
    command = [sys.executable, "-m", "nbconvert", *EXPORT, name]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    with browser_page() as page:
        page.route(
            "**/*", lambda r: r.continue_() if r.request.url.startswith("file:") else r.abort()
        )
        page.goto((tmp_path / "scratch.html").as_uri())
        drawings = page.locator("svg[role=img]")
        assert drawings.count() == 3
        for i in range(3):
            drawings.nth(i).scroll_into_view_if_needed()
            assert drawings.nth(i).is_visible()
            box = drawings.nth(i).bounding_box()
            assert box["width"] > 600
            assert box["height"] > 300
        shoot(page, "exported")
