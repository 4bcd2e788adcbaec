"""Simulate at its edges: wrong sizes, special machines, very many ranks; and on the command line."""

import itertools
import json
import sys

import pytest
from typer.testing import CliRunner

from tasp_core import Documents, PlanError, TopologyError, machine, plan, select, simulate
from tasp_core.cli.app import app


def full(tokens, ranks, schedule, where, **options):
    """A full-mask plan on contiguous equal shards: one message a hop, every share needed."""
    docs = Documents.of([tokens * ranks], causal=False)
    return plan(docs, ranks, schedule=schedule, layout="contiguous", machine=where, **options)


def run(p, where=None, **options):
    return simulate(p, where, **{"heads": 1, "head_dim": 128, "dtype": "bfloat16", **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "int8"}, "dtype must be one of .* got 'int8'"),
        ({"heads": 0}, "heads must be a whole number >= 1"),
        ({"heads": 3, "kv_heads": 2}, "3 query heads are not a multiple of 2"),
        ({"head_dim": -1}, "head_dim must be"),
        ({"batch": 0}, "batch must be"),
        ({"where": machine("mesh4")}, "machine 'mesh4' has 4 ranks, the plan 8"),
    ],
)
def test_sizes_that_make_no_sense(options, reason):
    with pytest.raises(PlanError, match=reason):
        run(plan([64], 8), **options)


def test_groups_of_a_special_machine_ask_for_it():
    odd = machine("mesh4x2").degraded({"nic_in 1": 1.0})
    p = plan([640], 8, schedule="ring", machine=odd, intra=2)
    with pytest.raises(PlanError, match="give simulate the machine itself"):
        run(p, heads=2)
    assert run(p, odd, heads=2).comm_s > run(p, machine("mesh4x2"), heads=2).comm_s
    with pytest.raises(TopologyError, match="no route"):
        odd.degraded({f"nic_in {r}": 0 for r in range(4)})


def test_a_machine_may_be_given_by_name(tmp_path):
    p = plan([4096], 8, machine="mesh4x2")
    direct, named = (run(p, where) for where in (machine("h100"), "h100"))
    assert named.total_s == direct.total_s != run(p).total_s
    path = tmp_path / "m.json"
    path.write_text(machine("h100").to_json())
    assert run(p, path).total_s == direct.total_s
    sizes = {"heads": 8, "head_dim": 128}
    docs = Documents.of([4096])
    assert (
        select(docs, "mesh4", **sizes).as_dict()
        == select(docs, machine("mesh4"), **sizes).as_dict()
    )
    for ask in (lambda: run(p, "h200"), lambda: select(docs, "h200", **sizes)):
        with pytest.raises(TopologyError, match="no machine 'h200'"):
            ask()
    with pytest.raises(PlanError, match="machine 'mesh3' has 3 ranks, the plan 8"):
        run(p, "mesh3")


@pytest.mark.parametrize("schedule", ["tasp", "tasp_paths", "wave"])
def test_rank_0_stands_for_all(schedule, monkeypatch):
    where = machine("h100x2")
    p = full(15 * 14 * 8, 16, schedule, where)
    for backward in (False, True):
        one_by_one = run(p, backward=backward)
        monkeypatch.setattr(sys.modules["tasp_core.costs.simulate"], "MANY_HOPS", 0)
        alike = run(p, backward=backward)
        monkeypatch.undo()
        assert alike.total_s == pytest.approx(one_by_one.total_s, rel=1e-9)
        assert alike.comm_s == pytest.approx(one_by_one.comm_s, rel=1e-9)
        assert alike.bound_s == pytest.approx(one_by_one.bound_s, rel=1e-9)
        assert alike.link_bytes == pytest.approx(one_by_one.link_bytes)
        assert alike.compute.shape == one_by_one.compute.shape


@pytest.mark.parametrize("schedule", ["wave", "tasp_paths"])
def test_1024_ranks(schedule):
    p = plan([1 << 20], 1024, schedule=schedule, machine="h100x128")
    found = run(p, heads=32, kv_heads=8)
    assert found.compute.shape[0] == 1024
    assert found.bound_s == pytest.approx(127 * 1024 * 512 * 8 / 50e9)
    assert found.total_s >= found.bound_s
    uneven = machine("h100x128").degraded({"nic_in 0": 1.0})
    with pytest.raises(PlanError, match="too many to simulate"):
        run(plan([1 << 20], 1024, schedule="tasp", machine=uneven))


def test_the_published_pattern():
    """FACTS: 8 MI300X, batch 48. Where computing hides less than all, ours is 1 / CCR, theirs less.

    Published 2.4, 1.8, 1.5, 1.3, 1.1 at 10K to 100K tokens (largest 3.58), no gain above CCR 1.5; in
    one H100 node 1.05 on average: there the rings' messages cost more than they save.
    """
    gains = {}
    for name, tokens in itertools.product(
        ("mi300x", "h100"), (10_000, 20_000, 40_000, 50_000, 100_000)
    ):
        docs = Documents.of([tokens], causal=False)
        sizes = {"heads": 8, "head_dim": 64, "batch": 48}
        ring, tasp = (
            simulate(plan(docs, 8, schedule=s, machine=name), **sizes) for s in ("ring", "tasp")
        )
        gains[name, tokens] = ring.total_s / tasp.total_s
        ccr = ring.compute_s / ring.comm_s
        assert gains[name, tokens] <= 1.005 or ccr < 1.5
        assert gains[name, tokens] <= min(7, 1.15 / ccr) or ccr > 1
    mesh = [x for (name, _), x in gains.items() if name == "mi300x"]
    assert mesh == sorted(mesh, reverse=True)
    assert 2.4 < mesh[0] < 7
    assert 1.8 < mesh[1] < 2.6
    assert mesh[-1] == pytest.approx(1.0, abs=0.1)
    assert all(0.9 < x < 1.2 for (name, _), x in gains.items() if name == "h100")


def cli(*words):
    return CliRunner().invoke(app, list(words))


def test_command_line():
    words = [
        "simulate",
        "--docs",
        "8192",
        "--ranks",
        "8",
        "--machine",
        "mi300x",
        "--head-dim",
        "128",
    ]
    text = cli(*words, "--schedule", "ring").stdout
    assert "communication alone" in text
    assert "cut bound" in text
    found = json.loads(cli(*words, "--schedule", "tasp", "--json").stdout)
    direct = simulate(plan([8192], 8, machine="mi300x"), heads=8, kv_heads=2, head_dim=128)
    assert found["forward"]["total_s"] == pytest.approx(direct.total_s)
    assert found["backward"]["comm_s"] > found["forward"]["comm_s"]
    assert found["forward"]["link_bytes"] == pytest.approx(direct.link_bytes)
    assert cli("simulate", "--machine", "h200").exit_code != 0
