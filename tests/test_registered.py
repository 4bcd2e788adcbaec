"""Every registered schedule, a new one too: its example, options, limits, token counts, exact results.

Nothing here names a schedule, except the list of those that are published: a file that is added to
tasp_core/schedules is tested as it is.
"""

from __future__ import annotations

import itertools
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tasp_core as tasp
from tasp_core.cli.app import app
from tasp_core.costs.bytes import RowBytes, formula, wire_bytes
from tasp_core.lab.bench.accuracy import Inputs, Reference, run_rank
from tasp_core.schedules import SCHEDULES, Schedule, build

NAMES = list(SCHEDULES)
PUBLISHED = [
    "ring",
    "double_ring",
    "tasp",
    "tasp_paths",
    "tasp_rails",
    "wave",
    "paced",
    "trees",
    "all_gather",
    "helper",
    "token_ring",
    "mesh",
    "sap",
]
ROW = RowBytes.of(4, 2, 16, 4)
PLACES = ["mesh1", "mesh2", "mesh3", "mesh5", "mesh8", "mesh1x2", "mesh2x2", "mesh4x2", "mesh2x4"]
DOCS = [
    tasp.Documents.of([96], causal=False),
    tasp.Documents.of([137, 41, 89]),
    tasp.Documents.of([3, 0, 50, 1], window=20),
]


def shown(name: str) -> tasp.Plan:
    """The plan of a schedule's example."""
    example = SCHEDULES[name].example
    assert example is not None, f"{SCHEDULES[name].__qualname__} needs an example"
    where = tasp.machine(example.machine)
    return tasp.plan(
        tasp.Documents.of(example.lengths, causal=example.causal),
        where.ranks,
        schedule=name,
        layout=example.layout,
        machine=where,
        schedule_options=dict(example.options) or None,
    )


def plans(name: str, docs: tasp.Documents, layout: str = "zigzag") -> list[tasp.Plan]:
    """The schedule on every place that it supports."""
    made = []
    for place in PLACES:
        how = {"schedule": name, "layout": layout, "machine": place}
        ranks = tasp.machine(place).ranks
        if tasp.supports(docs, ranks, **how):
            made.append(tasp.plan(docs, ranks, **how))
    return made


def test_published_names_keep_their_order():
    assert [name for name in tasp.schedules() if name in PUBLISHED] == PUBLISHED
    assert NAMES[0] == PUBLISHED[0]  # the baseline of select's reasons


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name):
    cls = SCHEDULES[name]
    assert cls.name == name
    assert re.fullmatch("[a-z][a-z0-9_]*", name)
    line = tasp.schedules()[name]
    assert line == cls.__doc__
    assert 10 < len(line) <= 100
    assert "\n" not in line
    assert Path(sys.modules[cls.__module__].__file__).read_text().startswith('"""')
    for option in cls.options_taken():
        assert option.doc, f"option {option.name} needs a line"
        assert "\n" not in option.doc
        assert option.type == type(option.default).__name__


@pytest.mark.parametrize("name", NAMES)
def test_its_example_is_proved_and_has_its_steps(name):
    p, example = shown(name), SCHEDULES[name].example
    assert tasp.check(p).pairs == p.docs.num_pairs
    assert p.schedule.num_steps() == example.steps
    assert set(example.options) <= set(p.schedule.options)
    result = CliRunner().invoke(
        app,
        ["check", "--docs", ",".join(map(str, example.lengths)), "--ranks", str(p.ranks)]
        + ["--schedule", name, "--layout", example.layout, "--machine", example.machine]
        + ["--options", ",".join(f"{k}={v}" for k, v in example.options.items()), "--json"]
        + ["--full"] * (not example.causal),
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_plan_files_and_pickles_rebuild_it(name):
    for p in (shown(name), *plans(name, DOCS[1])):
        again = tasp.Plan.from_json(p.to_json())
        assert again == p
        assert again.fingerprint() == p.fingerprint()
        assert again.schedule.options == p.schedule.options
        copied = pickle.loads(pickle.dumps(p))
        for backward in (False, True):
            lines = p.hops(backward=backward).lines()
            assert again.hops(backward=backward).lines() == lines
            assert copied.hops(backward=backward).lines() == lines


@pytest.mark.parametrize("name", NAMES)
def test_it_is_proved_wherever_it_is_supported(name):
    proved = 0
    for docs, layout in zip(DOCS, itertools.cycle(tasp.layouts()), strict=False):
        for p in plans(name, docs, layout):
            assert tasp.check(p).pairs == docs.num_pairs
            for backward in (False, True):
                steps = p.hops(backward=backward).step
                last = int(steps.max()) + 1 if steps.size else 0
                assert p.schedule.num_steps(backward=backward) == last
            proved += 1
    assert proved >= len(DOCS)


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_hop_is_caught(name):
    p = shown(name)
    lines = p.hops(backward=True).lines()
    tasp.check(p.with_hops(lines))
    for lost in (0, len(lines) // 2, len(lines) - 1):
        with pytest.raises(tasp.PlanError):
            tasp.check(p.with_hops(lines[:lost] + lines[lost + 1 :]))


@pytest.mark.parametrize("name", NAMES)
def test_its_limits_are_not_loose(name):
    """On its example links or NICs carry what is declared: one share less is refused."""
    p = shown(name)
    report, limits = tasp.check(p), p.schedule.limits
    assert report.peak_shards <= limits.buffer + 1e-9
    if not report.links_proved:  # a collective's links are its library's choice
        return
    loads = [report.max_load] * (limits.inside > 0) + [report.max_nic] * (p.machine.num_nodes > 1)
    assert max(loads) in (limits.inside, limits.across)
    tight = limits._replace(inside=report.max_load - 1, across=max(0, report.max_nic - 1))
    with pytest.raises(tasp.PlanError, match="are declared"):
        tasp.check(p.with_hops(p.hops(backward=True).lines(), limits=tight))


@pytest.mark.parametrize("name", NAMES)
def test_token_counts_are_what_programs_send_and_hold(name):
    """On the example and on one rank; test_formulas has all layouts, masks and machines."""
    for p in (*plans(name, DOCS[0])[:1], shown(name)):
        closed = formula(p, ROW)
        if closed is None:
            assert p.schedule.variable_size, "only what depends on documents has no formula"
            continue
        passes = [[tasp.lower(p, r, backward=b) for r in range(p.ranks)] for b in (False, True)]
        sent = [
            sum(wire_bytes(x, ROW, sent=True, backward=bool(b)) for x in programs)
            for b, programs in enumerate(passes)
        ]
        assert list(closed.sent) == sent, str(p)
        buffers = [
            x.kv_buffer_rows * ROW.kv + x.remote_query_rows * (ROW.q[0] + ROW.partial[0])
            for x in passes[0]
        ]
        assert max(buffers) <= closed.buffers + 1e-6, str(p)


def results(rank, group, made, inputs):
    return [run_rank(rank, group, p, inputs)[0] for p in made]


def runs(ranks):
    """Of each schedule the last place with so many ranks: several nodes if it supports them."""
    docs = tasp.Documents.of([137, 1, 300, 74])
    made = ([p for p in plans(name, docs) if p.ranks == ranks] for name in NAMES)
    return docs, [p[-1] for p in made if p]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_results_are_exact_on_real_ranks(ranks):
    """All schedules on ranks of one launch; layouts, masks and heads are test_exact's."""
    docs, made = runs(ranks)
    inputs = Inputs.random(docs.total, 4, 2, 16, seed=ranks)
    reference = Reference(inputs, docs)
    pieces = (
        tasp.launch(results, ranks, made, inputs, timeout_s=250)
        if ranks > 1
        else [results(0, None, made, inputs)]
    )
    for i, p in enumerate(made):
        errors = reference.errors([piece[i] for piece in pieces], p)
        assert errors.ok, (str(p), errors)
    assert len(made) > len(NAMES) // 2


def test_every_schedule_runs_on_eight_ranks():
    assert {p.schedule.name for p in runs(8)[1]} == set(NAMES)


@pytest.mark.parametrize("place", ["mesh4", "mesh2x2", "a100_pcie"])
def test_select_tries_it_or_says_why_not(place):
    where = tasp.machine(place)
    table = tasp.select(tasp.Documents.of([4096]), where, heads=8, head_dim=64).table
    assert {row.schedule for row in table} == set(NAMES)
    for name in NAMES:
        reasons = {row.excluded for row in table if row.schedule == name and row.excluded}
        if (why := SCHEDULES[name].unsuited(where)) != "":
            assert reasons == {why}
        for options in SCHEDULES[name].candidates(where, 1e6):
            tried = [row for row in table if (row.schedule, row.options) == (name, options)]
            assert tried or reasons, (name, options)


NEWCOMER = '''"""Everything to everybody in one step; a test adds this file and nothing else."""

import numpy as np

from .hops import KV, Hops
from .routed import return_arcs
from .schedule import DeclaredLimits, Example, Schedule, option


class Burst(Schedule):
    """every rank's KV to every rank by single messages"""

    name = "burst"
    example = Example("mesh3", steps=1)

    @property
    def num_shares(self):
        return 1

    @property
    def limits(self):
        return DeclaredLimits(1, self.ranks - self.node_size, self.ranks - 1.0)

    def _hops(self):
        src, dst = np.nonzero(~np.eye(self.ranks, dtype=bool))
        return Hops.grid(KV, True, np.zeros_like(src), src, dst, src, np.array(0))

    def forward(self, rank):
        hops = self._hops()
        return hops if rank is None else hops.where((hops.src == rank) | (hops.dst == rank))

    def gradients(self, rank):
        back = return_arcs(self._hops(), np.ones((self.ranks, self.ranks, 1), dtype=np.int64))
        return back if rank is None else back.where((back.src == rank) | (back.dst == rank))
'''
USED = """
import sys, tasp_core as tasp
assert tasp.schedules()["burst"] == "every rank's KV to every rank by single messages"
assert "torch" not in sys.modules
p = tasp.plan([64], 4, schedule="burst", machine="mesh2x2")
assert tasp.check(p).pairs == p.docs.num_pairs
assert tasp.Plan.from_json(p.to_json()) == p
table = tasp.select(tasp.Documents.of([512]), tasp.machine("mesh2x2"), heads=4, head_dim=32).table
assert any(row.schedule == "burst" and row.total_s > 0 for row in table)
print(tasp.__file__)
"""


def test_a_newcomer_is_one_file(tmp_path):
    package = tmp_path / "tasp_core"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(tasp.__file__).parent, package, ignore=ignored)
    (package / "schedules" / "burst.py").write_text(NEWCOMER)
    command = [sys.executable, "-c", USED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_a_taken_name_is_refused_and_a_subclass_without_a_name_is_not_registered():
    taken = SCHEDULES[NAMES[0]]
    with pytest.raises(tasp.PlanError, match=f"schedule name '{taken.name}' is taken by"):
        type("Other", (taken,), {"name": taken.name})
    unnamed = type("Unnamed", (taken,), {})
    assert unnamed.name == taken.name
    assert SCHEDULES[taken.name] is taken
    assert list(SCHEDULES) == NAMES


def test_options_that_a_schedule_has_not_are_refused_with_those_that_it_has():
    for name, cls in SCHEDULES.items():
        taken = ", ".join(option.name for option in cls.options_taken()) or "none"
        with pytest.raises(
            tasp.PlanError, match=f"'{name}' has no option colour; it takes {taken}"
        ):
            build(name, tasp.machine("mesh2x2"), {"colour": 1})


def test_what_a_newcomer_has_to_write():
    assert Schedule.__abstractmethods__ == {"num_shares", "limits", "forward", "gradients"}


@pytest.fixture
def registry():
    """What a test registers is gone after it."""
    before = dict(SCHEDULES)
    yield SCHEDULES
    SCHEDULES.clear()
    SCHEDULES.update(before)


def redefined(**members):
    """A class as a notebook's cell defines it, each time it runs."""
    ring = SCHEDULES["ring"]
    return type("Mine", (ring,), {"name": "mine", "__module__": "__main__", **members})


def test_a_class_that_is_defined_again_takes_its_place_in_plans_too(registry):
    first = redefined()
    before = tasp.plan([40], 4, schedule="mine")
    again = redefined(order=7)
    after = tasp.plan([40], 4, schedule="mine")
    assert type(before.schedule) is first
    assert type(after.schedule) is registry["mine"] is again
    assert (
        before != after
    )  # what is remembered of one, programs for instance, is not used for the other
    assert before.fingerprint() == after.fingerprint()


def test_select_proposes_no_class_of_a_user(registry):
    machine = tasp.machine("mesh4")
    asked = dict(heads=4, head_dim=32)
    redefined(gradients=lambda self, rank: self.forward(rank).where(np.zeros(0, dtype=int)))
    names = {row.schedule for row in tasp.select(tasp.Documents.of([512]), machine, **asked).table}
    assert "mine" not in names
    assert names <= set(NAMES)
    named = tasp.select(tasp.Documents.of([512]), machine, **asked, schedule="mine")
    assert named.plan.schedule.name == "mine"


@pytest.mark.parametrize("name", ["auto", "table"])
def test_reserved_names(name):
    with pytest.raises(tasp.PlanError, match=f"schedule name '{name}' is reserved"):
        type("Mine", (SCHEDULES["ring"],), {"name": name})
    assert name not in SCHEDULES


def test_a_class_of_the_same_name_elsewhere_does_not_take_a_place(registry):
    ring = SCHEDULES["ring"]
    with pytest.raises(
        tasp.PlanError, match=r"'ring' is taken by tasp_core\.schedules\.ring\.Ring"
    ):
        type("Ring", (ring,), {"name": "ring", "__module__": "__main__"})
    assert SCHEDULES["ring"] is ring


def test_a_class_without_its_methods_says_which(registry):
    type("Half", (Schedule,), {"name": "half", "__module__": "__main__"})
    with pytest.raises(tasp.PlanError, match="Half does not define forward, gradients"):
        tasp.plan([8], 2, schedule="half")
    assert tasp.select([512], "mesh4", heads=4, head_dim=32, layout="zigzag").plan
