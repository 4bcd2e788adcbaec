"""Widgets: every control redraws the figure; impossible combinations show the planner's error."""

from __future__ import annotations

import itertools
import json
import random
import time
import xml.etree.ElementTree as ET

import pytest
from spread import spread

import tasp_core as tasp
from visualize import Figure, hops, mask, rings

pytest.importorskip("ipywidgets", reason="ipywidgets comes with make notebooks")

from ipywidgets.embed import dependency_state

from visualize import widgets

NAMES = sorted(n for n in dir(widgets) if n.startswith("explore_"))
TEXTS = ("1904, 137 89", "4096", "", "0", "7 7 7", "12, x", "-3", "1")
EVERY = pytest.mark.parametrize("name", NAMES)


def values(control) -> list:
    """Values to try: all options, both ends and the middle of a slider, both states, several texts."""
    if hasattr(control, "options"):
        return [o[1] if isinstance(o, tuple) else o for o in control.options]
    if hasattr(control, "min"):
        return sorted({control.min, control.min + 1, (control.min + control.max) // 3, control.max})
    return [True, False] if isinstance(control.value, bool) else list(TEXTS)


def is_shown(explorer) -> bool:
    """Whether the area holds the figure, or the error where there is none."""
    if explorer.figure is None:
        return 'role="alert"' in explorer.area.value and bool(explorer.error)
    ET.fromstring(explorer.area.value)
    return explorer.area.value == explorer.figure.svg and not explorer.error


def test_all_five_are_there():
    wanted = {f"explore_{n}" for n in ("rings", "mask", "schedule", "balance", "machine")}
    assert set(NAMES) == wanted


@EVERY
def test_default_state_is_small_and_visible_without_a_kernel(name):
    explorer = getattr(widgets, name)()
    bundle = explorer._repr_mimebundle_()
    assert set(bundle) == {
        "text/plain",
        "application/vnd.jupyter.widget-view+json",
        "image/svg+xml",
    }
    assert ET.fromstring(bundle["image/svg+xml"])[0].text == explorer.figure.title
    assert explorer.figure.title in bundle["text/plain"]
    assert len(json.dumps(dependency_state(explorer))) + len(json.dumps(bundle)) < 100_000


@EVERY
def test_every_control_redraws_quickly(name):
    explorer = getattr(widgets, name)()
    for control in explorer.controls.values():
        before = control.value
        for value in values(control):
            start = time.process_time()
            control.value = value
            spent = time.process_time() - start
            assert is_shown(explorer)
        control.value = before
        start = time.process_time()
        explorer.update()
        spent = time.process_time() - start
        assert spent < 0.45, f"{name}: {spent:.2f} s; a quiet machine needs less than 0.15 s"
        assert is_shown(explorer)


@pytest.mark.parametrize(("seed", "name"), spread(itertools.product((0, 1), NAMES), keep=5))
def test_any_combination_shows_a_figure_or_says_why_not(name, seed):
    rng, explorer = random.Random(seed), getattr(widgets, name)()
    good = {n: c.value for n, c in explorer.controls.items()}
    for _ in range(8):
        for control in explorer.controls.values():
            control.value = rng.choice(values(control))
        assert is_shown(explorer)
    for control, value in zip(explorer.controls.values(), good.values(), strict=True):
        control.value = value
    assert isinstance(explorer.figure, Figure)


def test_the_planner_s_error_is_shown_in_place_of_the_figure():
    explorer = widgets.explore_rings(schedule="tasp_paths", ranks=3, nodes=2)
    with pytest.raises(tasp.PlanError) as error:
        tasp.plan([1024], 6, schedule="tasp_paths", machine="mesh3x2")
    assert explorer.error == str(error.value)
    assert "even number of ranks per node, got 3" in explorer.area.value
    assert explorer._repr_mimebundle_()["text/plain"] == explorer.error
    explorer.controls["ranks"].value = 4
    assert (
        explorer.figure.svg
        == rings(tasp.plan([1024], 8, schedule="tasp_paths", machine="mesh4x2")).svg
    )


def test_errors_are_escaped():
    explorer = widgets.explore_mask(lengths="<b>")
    assert "&lt;b&gt;" in explorer.area.value
    assert "<b>" not in explorer.area.value


def test_schedule_steps_through_hops_and_tiles():
    explorer = widgets.explore_schedule(schedule="ring", ranks=4, lengths="64")
    p, control = tasp.plan([64], 4, schedule="ring"), explorer.controls
    assert control["step"].max == 2
    for step in range(3):
        control["step"].value = step
        assert explorer.figure.svg == hops(p, step=step, label="ring").svg
    control["view"].value = "tiles"
    assert control["step"].max == 3
    control["rank"].value, control["step"].value = 2, 3
    assert explorer.figure.svg == mask(p, rank=2, step=3).svg
    control["ranks"].value = 2
    assert (control["step"].max, control["step"].value) == (1, 1)
