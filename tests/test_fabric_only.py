"""`fabric bench --only`: some cases measured again, a file's others kept. No network is built."""

from __future__ import annotations

import copy
import json
import sys

import pytest

from tasp_core.cli import app as cli
from tasp_core.errors import PlanError
from tasp_core.lab.bench import emulated as fabric_bench
from tasp_core.lab.bench.collect import collect
from tasp_core.lab.bench.emulated import chosen, earlier_cases
from tasp_core.lab.bench.emulated_cases import cases, goals_of
from tasp_core.lab.bench.passes import DIRECTIONS, MODES
from tasp_core.lab.emulation import network as fabric

TITLES = [str(case) for case in cases()]
STAMP = ("measured_at", "environment", "rates")
RATES = {"latency_s": 1.0, "tflops": 0.5}
WAVE = "two nodes, wave against Ring, communication"


def seconds(case, first):
    """Rows of its methods, a sample a figure: `first` seconds of the first method, 1 of the others."""
    ways = DIRECTIONS[: 1 + case.backward]
    names = [f"{mode} {way}" for mode in case.modes for way in ways]
    predicted = {f"{what} {way}": 1.0 for what in (*MODES, "bound") for way in ways}
    took = [first] + [1.0] * (len(case.methods) - 1)
    return [
        {"label": m.label, "samples": {name: [s] for name in names}, "predicted": predicted}
        for m, s in zip(case.methods, took, strict=True)
    ]


def result(case, first):
    """A case as in files from before cases had stamps."""
    return {
        "title": str(case),
        "config": case.config(),
        "methods": seconds(case, first),
        "right": True,
    }


def file():
    """A result file of all cases; Ring takes three times as long as other methods."""
    rows = [result(case, 3.0) for case in cases()]
    data = {
        "schema": 1,
        "kind": "fabric",
        "environment": {"processor": "another"},
        "right": True,
        "config": {"quick": False, "rates": {"latency_s": 2.0}},
        "calibration": {},
        "cases": rows,
        "goals": [goal._asdict() for goal in goals_of(rows)],
    }
    return json.loads(json.dumps(data))


OLD = file()


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Titles of what is "measured" here: Ring takes twice as long as in the file."""
    done = []

    def run_case(case, rates):
        done.append(str(case))
        return result(case, 6.0)

    monkeypatch.setattr(fabric, "enter_rootless", lambda words: None)
    monkeypatch.setattr(fabric_bench, "calibrated", lambda *_: (RATES, {"a kernel": [1.0]}))
    monkeypatch.setattr(fabric_bench, "run_case", run_case)
    return done


@pytest.fixture
def command(monkeypatch):
    """Runs `fabric bench` with these words; its exit code."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["tasp_core", "fabric", "bench", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code

    return run


def write(path, data):
    path.write_text(json.dumps(data))
    return path


def test_a_file_keeps_its_other_cases_in_order(tmp_path, command, measured):
    old = copy.deepcopy(OLD)
    old["cases"].reverse()
    out = write(tmp_path / "fabric.json", old)
    assert command("--only", "NODES:", "--out", out) == 0
    assert measured == [t for t in TITLES if t.startswith("nodes:")]
    data = json.loads(out.read_text())
    assert [c["title"] for c in data["cases"]] == TITLES
    before = {c["title"]: c for c in OLD["cases"]}
    for case in data["cases"]:
        unchanged = {k: v for k, v in case.items() if k not in STAMP} == before[case["title"]]
        assert unchanged == (case["title"] not in measured)
    config = data["config"]
    assert (config["only"], config["measured"], config["dropped"]) == ("NODES:", measured, [])
    assert sorted(config["kept"]) == sorted(set(TITLES) - set(measured))
    assert [f.case for f in collect(tmp_path)[0]]


def test_every_case_says_when_and_with_which_rates_it_was_measured(tmp_path, command, measured):
    out = write(tmp_path / "fabric.json", OLD)
    command("--only", "packed:", "--out", out)
    for case in json.loads(out.read_text())["cases"]:
        if case["title"] in measured:
            assert case["rates"] == RATES
            assert case["measured_at"].endswith("+00:00")
            assert case["environment"]["cores"]
        else:
            assert case["rates"] == OLD["config"]["rates"]
            assert case["measured_at"] is None
            assert case["environment"] == {"processor": "another"}
    first = {c["title"]: c for c in json.loads(out.read_text())["cases"]}
    command("--only", "nodes:", "--out", out)
    for case in json.loads(out.read_text())["cases"]:
        if not case["title"].startswith("nodes:"):  # stamps stay when a merged file is merged again
            assert case == first[case["title"]]


def test_goals_are_judged_over_the_merged_cases(tmp_path, command):
    out = write(tmp_path / "fabric.json", OLD)
    command("--only", "nodes:", "--out", out)
    old = {g["text"]: g["found"] for g in OLD["goals"]}
    new = {g["text"]: g["found"] for g in json.loads(out.read_text())["goals"]}
    assert new.keys() == old.keys()
    assert new[WAVE] == pytest.approx(2 * old[WAVE])
    others = [t for t in old if t.startswith(("packed", "TASP"))]
    assert others
    assert [new[t] for t in others] == [old[t] for t in others]


@pytest.mark.parametrize("change", ["title", "methods"])
def test_cases_that_are_not_defined_so_any_more_are_dropped_and_named(
    tmp_path, command, capsys, change
):
    old = copy.deepcopy(OLD)
    gone = old["cases"][0]
    if change == "title":
        gone["title"] = "mesh: of long ago"
    else:
        gone["config"]["methods"].pop()
    out = write(tmp_path / "fabric.json", old)
    command("--only", "volume:", "--out", out)
    data = json.loads(out.read_text())
    assert [c["title"] for c in data["cases"]] == TITLES[1:]
    assert data["config"]["dropped"] == [gone["title"]]
    assert f"dropped, no case is defined so any more: {gone['title']}" in capsys.readouterr().out


def test_a_wrong_case_ends_the_run_and_fails_the_file(tmp_path, command, monkeypatch):
    right = fabric_bench.run_case
    monkeypatch.setattr(fabric_bench, "run_case", lambda *x: right(*x) | {"right": False})
    out = write(tmp_path / "fabric.json", OLD)
    assert command("--only", "volume:", "--out", out) == 1
    data = json.loads(out.read_text())
    assert not data["right"]
    assert [c["title"] for c in data["cases"] if not c["right"]] == data["config"]["measured"]
    assert len(data["config"]["kept"]) == len(TITLES) - 1


def test_without_a_file_it_is_these_cases_alone(tmp_path, command, measured):
    out = tmp_path / "new.json"
    assert command("--only", "volume:", "--out", out) == 0
    assert [c["title"] for c in json.loads(out.read_text())["cases"]] == measured
    assert len(measured) == 3


def test_without_only_a_file_is_replaced(tmp_path, command, measured):
    out = write(tmp_path / "fabric.json", {"no": "result file"})
    assert command("--out", out) == 0
    assert measured == TITLES
    data = json.loads(out.read_text())
    assert data["config"] == {"quick": False, "rates": RATES}
    assert all(case["rates"] == RATES for case in data["cases"])


def test_an_unknown_text_names_the_groups_and_measures_nothing(tmp_path, command, capsys, measured):
    out = write(tmp_path / "fabric.json", OLD)
    before = out.read_bytes()
    assert command("--only", "no such case", "--out", out) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "no case has 'no such case' in its title" in said
    assert "mesh:, devices:, volume:, packed:, nodes:" in said
    assert (measured, out.read_bytes()) == ([], before)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not JSON", "cannot read the result file"),
        ("[]", "has schema None and kind None"),
        (json.dumps(OLD | {"schema": 0}), "has schema 0 and kind 'fabric', wanted are 1 and"),
        (json.dumps(OLD | {"kind": "packed"}), "has schema 1 and kind 'packed', wanted are 1 and"),
        (json.dumps({"schema": 1, "kind": "fabric"}), "is not a whole result file"),
        (json.dumps(OLD | {"config": OLD["config"] | {"quick": True}}), "is of the quick cases"),
    ],
)
def test_another_file_is_refused_before_anything_is_measured(
    tmp_path, command, capsys, measured, text, said
):
    out = tmp_path / "fabric.json"
    out.write_text(text)
    assert command("--only", "nodes:", "--out", out) == 2
    assert said in capsys.readouterr().err
    assert (measured, out.read_text()) == ([], text)


def test_titles_tell_cases_apart_and_any_capitals_find_them():
    for quick in (False, True):
        titles = [str(case) for case in cases(quick=quick)]
        assert len({*titles}) == len(titles)
    assert chosen(cases(), "mesh4X2") == [c for c in cases() if c.machine == "mesh4x2"]
    assert {c.group for c in chosen(cases(), "nodes:")} == {"nodes"}


def test_a_folder_is_no_result_file(tmp_path):
    with pytest.raises(PlanError, match="cannot read"):
        earlier_cases(tmp_path, quick=False)
