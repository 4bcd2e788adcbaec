"""Course: notebooks are those of their sources; checks reject stubs and wrong answers, pass solutions."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupytext", reason="the course needs the notebooks' packages: make notebooks")
from tasp_course.build import notebook, outputs
from tasp_course.kit import checks, teachers_kit, wrong_answers
from tasp_course.sources import HERE, KINDS, ROOT, cells, minutes, tags, units

UNITS = pytest.mark.parametrize("source", units(), ids=lambda p: p.stem[:7])
NAMED = lambda path: f"{path.parent.name}/{path.stem[:7]}"  # noqa: E731
BUILT = outputs()
LONGEST_CELL, EXERCISES = 20, 3


@cache
def answers(source: Path, tag: str) -> dict[str, Any]:
    """The namespace after the unit's set-up cells and its cells with this tag."""
    names: dict[str, Any] = {"__name__": "answers"}
    for cell in cells(source):
        if cell.cell_type == "code" and {"setup", tag} & set(tags(cell)):
            exec(compile(cell.source, f"{source.name}, {tag}", "exec"), names)
    return names


def links(text: str) -> list[str]:
    """Targets of markdown links, without anchors; a link may begin a new line of a comment."""
    return re.findall(r"\]\(([^)#]+)", text)


def asked(source: Path) -> dict[str, str]:
    """The expression each check is called with, by the check's name."""
    code = "\n".join(c.source for c in cells(source) if "check" in tags(c))
    return dict(re.findall(r"^unit\.(check_\w+)\((.*)\)$", code, flags=re.MULTILINE))


@pytest.mark.parametrize("path", BUILT, ids=NAMED)
def test_notebooks_are_those_of_their_sources(path):
    assert path.read_text() == BUILT[path], "run: python -m tasp_course.build"


def test_there_are_no_other_notebooks():
    present = {p for p in HERE.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    assert present == set(BUILT)


def test_all_units_are_there():
    assert [source.stem[5:7] for source in units()] == [f"{number:02}" for number in range(13)]


@UNITS
def test_a_unit_has_its_parts(source):
    code = [c for c in cells(source) if c.cell_type == "code"]
    assert max(len(c.source.splitlines()) for c in code) <= LONGEST_CELL
    assert len(source.read_text().splitlines()) < 300
    kinds = [next((t for t in ("exercise", "solution", "check") if t in tags(c)), "") for c in code]
    order = [k for k in kinds if k]
    assert order == ["exercise", "solution", "check"] * (len(order) // 3)
    assert len(order) // 3 >= EXERCISES + 1  # and the recap
    assert minutes(source) >= 15
    prose = "\n".join(c.source for c in cells(source) if c.cell_type == "markdown")
    for part in ("Picture and question", "Play", "Recap"):
        assert re.search(rf"^## {part} \(\d+ min\)$", prose, re.MULTILINE), part
    assert set(asked(source)) == set(wrong_answers(source)) >= {"check_recap"}


@UNITS
def test_stubs_are_still_to_do(source):
    for name, answer in asked(source).items():
        verdict = getattr(checks(source), name)(eval(answer, answers(source, "exercise")))
        assert verdict.state == "to do", (name, verdict)


@UNITS
def test_solutions_pass(source):
    for name, answer in asked(source).items():
        verdict = getattr(checks(source), name)(eval(answer, answers(source, "solution")))
        assert verdict.state == "right", (name, verdict)


@UNITS
def test_wrong_answers_fail(source):
    for name, wrong in wrong_answers(source).items():
        assert len(wrong) >= 2, name
        for label, answer in wrong.items():
            verdict = getattr(checks(source), name)(answer)
            assert verdict.state == "wrong", (name, label)
            assert verdict.hint, (name, label)
            assert "your answer raised" not in verdict.hint, (name, label, verdict)


@UNITS
def test_an_answer_that_raises_is_wrong_and_does_not_raise(source):
    def broken(*unused: Any, **more: Any) -> Any:
        raise KeyError("mine")

    for name in wrong_answers(source):
        verdict = getattr(checks(source), name)(broken)
        assert verdict.state == "wrong", (name, verdict)


def test_of_a_rank_that_raises_a_check_says_which_and_what_and_no_more():
    def typo(rank, group):
        return rank + "of"

    verdict = checks(units(["0"])[0]).check_hello(typo)
    assert verdict.state == "wrong"
    assert re.fullmatch(
        r"your answer raised TypeError on rank \d: unsupported operand .*", verdict.hint
    )


def test_a_function_that_returns_nothing_is_told_so():
    verdict = checks(units(["0"])[0]).check_hello(lambda rank, group: None)
    assert repr(verdict) == "still to do: your function returns nothing yet"


def test_a_function_of_whose_result_a_part_is_none_is_told_so():
    check = checks(units(["10"])[0]).check_backward
    assert repr(check(lambda *x: (x[1], None, x[3]))).endswith("your function returns is None")
    assert repr(check(lambda *x: (x[1], ..., None))) == "still to do"


@UNITS
def test_a_unit_ends_with_links_to_the_next_unit_and_the_index(source):
    last = notebook(source, "learner")["cells"][-1]["source"]
    after = units()[units().index(source) + 1 :]
    assert last.endswith("[All units](../index.ipynb)")
    assert last.startswith("Next: ") == bool(after)
    assert not after or f"({after[0].stem}.ipynb)" in last


@pytest.mark.parametrize(
    "path", [*BUILT, HERE / "README.md"], ids=lambda p: f"{p.parent.name}/{p.stem[:7]}"
)
def test_links_resolve(path):
    text = path.read_text()
    if path.suffix == ".ipynb":
        prose = (c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
        text = "\n".join("".join(lines) for lines in prose)
    for link in links(text):
        assert not link.startswith("http"), "a course without a network links to no page"
        assert (path.parent / link).exists(), link


@UNITS
def test_links_of_a_source_resolve_from_both_of_its_notebooks(source):
    for link in links(source.read_text()):
        name, suffix = Path(link).stem, Path(link).suffix
        if suffix == ".ipynb":
            assert name in {unit.stem for unit in units()}, f"no unit has the source {name}.py"
            continue
        for kind in KINDS:
            target = (HERE / kind / link).resolve()
            assert target.is_file(), link
            assert target.is_relative_to(ROOT), f"{link} leads out of the repository"


def test_learners_notebooks_go_on_after_an_error():
    for source in units():
        code = [c for c in notebook(source, "learner")["cells"] if c["cell_type"] == "code"]
        assert all("raises-exception" in c["metadata"]["tags"] for c in code)


def test_the_kit_has_minutes_and_wrong_answers():
    text = teachers_kit(units()[1:2])
    assert text.count("Common wrong answers") == 1
    assert "not yet: " in text
    assert "still to do" not in text
