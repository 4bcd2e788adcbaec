"""The course in a browser: units in JupyterLab, exported pages without a server; `make test-browser`."""

from __future__ import annotations

import shutil

import pytest
from lab import Lab, browser_page, cells, errors, figure, move_slider, run_all, shoot, show

pytest.importorskip("jupytext", reason="the course needs the notebooks' packages: make notebooks")
from nbformat import read

from tasp_course.export import execute, to_html
from tasp_course.sources import HERE, units

pytestmark = pytest.mark.browser

# a unit, the cell with sliders, the slider to move
PLAYED = [("2", "explore_schedule(", 0), ("6", "explore_rings(", 0), ("8", "explore_mask(", 0)]
HAVE = {p.stem[5:7].lstrip("0") or "0" for p in units()}


@pytest.mark.parametrize(("unit", "cell", "slider"), [p for p in PLAYED if p[0] in HAVE])
def test_a_learner_opens_a_unit_runs_it_and_moves_a_slider(unit, cell, slider, tmp_path):
    name = f"learner/{units([unit])[0].stem}.ipynb"
    shutil.copytree(HERE / "learner", tmp_path / "learner")  # running a notebook saves it
    with Lab(tmp_path) as lab, lab.page(name) as page:
        run_all(page)
        assert not errors(page)
        outputs = [
            o for c in cells(page) if "check" in c["metadata"].get("tags", ()) for o in c["outputs"]
        ]
        assert len(outputs) >= 4
        assert all("still to do" in str(o["data"]["text/plain"]) for o in outputs)
        show(page, cell)
        page.wait_for_selector(".widget-html-content svg")
        before = figure(page)
        shoot(page, f"unit-{unit}-before")
        move_slider(page, slider)
        assert figure(page) != before
        shoot(page, f"unit-{unit}-after")


RING = """def ring(n):
    return [f"t{t} {r}>{(r + 1) % n} kv{(r - t) % n}.0" for t in range(n - STEPS) for r in range(n)]"""


def test_a_learner_types_answers_until_one_is_right(tmp_path):
    shutil.copytree(HERE / "learner", tmp_path / "learner")
    with Lab(tmp_path) as lab, lab.page(f"learner/{units(['2'])[0].stem}.ipynb") as page:
        run_all(page)
        for answer, verdict in (
            ("1 / 0", "still to do"),
            (RING.replace("STEPS", "2"), "not yet"),
            (RING.replace("STEPS", "1"), "right"),
        ):
            number = next(
                i for i, c in enumerate(cells(page)) if "check_ring" in "".join(c["source"])
            )
            page.evaluate(
                "i => { const nb = jupyterapp.shell.currentWidget.content;"
                " nb.activeCellIndex = i; nb.mode = 'edit'; nb.scrollToItem(i); }",
                number - 1,
            )
            page.wait_for_timeout(500)
            page.keyboard.press("Control+A")
            page.keyboard.insert_text(answer)
            page.keyboard.press("Shift+Enter")
            page.keyboard.press("Shift+Enter")
            page.wait_for_function(
                "([i, verdict]) => jupyterapp.shell.currentWidget.content.model.toJSON().cells[i]"
                ".outputs.some(o => o.data && o.data['text/plain'].startsWith(verdict))",
                arg=[number, verdict],
                timeout=20_000,
            )
        shoot(page, "unit-2-right")


def test_the_index_opens(tmp_path):
    shutil.copy(HERE / "index.ipynb", tmp_path)
    with Lab(tmp_path) as lab, lab.page("index.ipynb") as page:
        run_all(page)
        assert not errors(page)
        assert "unit" in page.locator("table").first.inner_text()
        shoot(page, "index")


@pytest.mark.parametrize("source", units(), ids=lambda p: p.stem[:7])
def test_exported_units_show_every_figure_without_a_server(source, tmp_path):
    executed = execute(
        read(HERE / "learner" / f"{source.stem}.ipynb", as_version=4), HERE / "learner"
    )
    figures = [
        o
        for c in executed.cells
        for o in c.get("outputs", ())
        if "image/svg+xml" in o.get("data", {})
    ]
    assert figures
    file = tmp_path / "unit.html"
    file.write_text(to_html(executed), encoding="utf-8")
    with browser_page() as page:
        page.route(
            "**/*", lambda r: r.continue_() if r.request.url.startswith("file:") else r.abort()
        )
        page.goto(file.as_uri())
        drawings = page.locator("svg[role=img]")
        assert drawings.count() == len(figures)
        for i in range(len(figures)):
            drawings.nth(i).scroll_into_view_if_needed()
            assert drawings.nth(i).is_visible()
            box = drawings.nth(i).bounding_box()
            assert box["width"] > 300
            assert box["height"] > 100
        shoot(page, f"{source.stem[:7]}-exported")
