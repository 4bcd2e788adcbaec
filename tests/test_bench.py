"""Measuring: guards that fail a run, messages that travel together, goals, tables and curves."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tasp_core as tasp
from tasp_core.costs.bytes import BACKWARD, FORWARD
from tasp_core.errors import PlanError
from tasp_core.lab.bench import attention as attention_bench
from tasp_core.lab.bench import steps as steps_bench
from tasp_core.lab.bench.accuracy import Inputs, Reference, run_rank
from tasp_core.lab.bench.attention import Config, remote_unused, sampled_gap, too_fast
from tasp_core.lab.bench.collect import collect, write_csv
from tasp_core.lab.bench.emulated_cases import Goal, case_ccr, cases, gaps, goals_of, table
from tasp_core.lab.bench.passes import Pass, method_errors
from tasp_core.lab.emulation.device import CALL_S, Device
from tasp_core.lowering.lower import lower
from tasp_core.runtime.exchange import GlooExchange
from tasp_core.runtime.packing import packed_messages, put_rows, take_rows
from visualize.curves import PUBLISHED, curves, gains
from visualize.peers import peers, totals

DOCS = tasp.Documents.of([96])
INPUTS = Inputs.random(96, 4, 2, 16)


def on_ranks(ranks, fn, p, inputs=INPUTS):
    def work(rank, group):
        return fn(Pass(p, rank, group, inputs, lambda: dist.barrier(group=group)))

    return tasp.launch(work, ranks)


def deaf(self, t, sends, recvs, buffers):
    """An exchange whose messages bring what is expected of them, but nobody's values."""
    for m in recvs:
        for low, count in m.ranges:
            buffers[m.buffer][low : low + count] = 0.5
    return lambda: None


# ---- guards


def test_a_pass_that_ignores_remote_values_is_caught(monkeypatch):
    p = tasp.plan(DOCS, 3)
    assert on_ranks(3, remote_unused, p) == ["", "", ""]
    monkeypatch.setattr(GlooExchange, "post", deaf)
    said = on_ranks(3, remote_unused, p)
    assert sum(bool(x) for x in said) == 1
    assert "whatever values the other ranks hold" in "".join(said)


def test_own_errors_are_the_same_on_all_ranks_and_see_a_wrong_one(monkeypatch):
    p, oracle = tasp.plan(DOCS, 3), Reference(INPUTS, DOCS)
    good = on_ranks(3, lambda one: method_errors([one], oracle)[0], p)
    assert all(e.ok and e == good[0] for e in good)
    monkeypatch.setattr(GlooExchange, "post", deaf)
    bad = on_ranks(3, lambda one: method_errors([one], oracle)[0], p)
    assert not any(e.ok for e in bad)


def test_sampled_rows_find_a_wrong_output(monkeypatch):
    p = tasp.plan(DOCS, 3, schedule="ring")
    assert max(on_ranks(3, sampled_gap, p)) < 1e-5
    monkeypatch.setattr(GlooExchange, "post", deaf)
    assert max(on_ranks(3, sampled_gap, p)) > 1e-2


def test_nothing_is_faster_than_the_peak():
    assert too_fast(2.0, 1.0).startswith("2 TFLOP/s per rank, above the peak of 1")
    assert too_fast(0.9, 1.0) == too_fast(5.0, 0.0) == ""


@pytest.mark.parametrize("wrong", ["peak", "values"])
def test_a_guard_fails_the_run(monkeypatch, wrong):
    lines = []
    config = Config(
        (64,), ("ring", "tasp"), 2, repeats=1, peak_tflops=1e-9 if wrong == "peak" else 0.0
    )
    if wrong == "values":
        monkeypatch.setattr(attention_bench, "remote_unused", lambda one: "nobody listens")
    result = attention_bench.attention_bench(lines.append, config)
    assert not result["right"]
    assert all(row["wrong"] for row in result["rows"])
    assert bool(result["rows"][0]["samples"]) == (wrong == "peak")  # wrong values are not timed


# ---- messages


def kv_step(node="mesh2x2", schedule="wave"):
    p = tasp.plan(
        tasp.Documents.of([640], causal=False),
        4,
        schedule=schedule,
        machine=node,
        layout="contiguous",
    )
    return p, [lower(p, r) for r in range(4)]


def test_both_ends_bundle_a_links_messages_alike():
    _, programs = kv_step()
    together = 0
    for t in range(max(len(x.steps) for x in programs)):
        sent, got = {}, {}
        for r, program in enumerate(programs):
            for m in program.steps[t].sends:
                sent[r, m.peer, m.kind] = (m.tag, [n for _, n in m.ranges])
            for m in program.steps[t].recvs:
                got[m.peer, r, m.kind] = (m.tag, [n for _, n in m.ranges])
        assert sent == got
        assert len(sent) == sum(len(program.steps[t].sends) for program in programs)
        together += sum(len(parts) > 1 for _, parts in sent.values())
    assert together > 0


def test_large_messages_travel_in_parts(monkeypatch):
    _, programs = kv_step()
    m = next(m for m in programs[0].steps[1].sends if len(m.ranges) > 1)
    rows = {"kv": torch.zeros(1000, 8)}
    assert len(packed_messages([m], rows, receive=False)[0]) == 1
    monkeypatch.setattr("tasp_core.runtime.packing.SMALL_BYTES", 1)
    parts, landing = packed_messages([m], rows, receive=True)
    assert not landing
    assert [len(p.rows) for p in parts] == [count for _, count in m.ranges]
    assert len({p.tag for p in parts}) == len(parts)


def test_bundled_or_not_gives_the_same_bits(monkeypatch):
    p, _ = kv_step()
    inputs = Inputs.random(640, 2, 2, 8)

    def attend(one):
        posted, start = [], GlooExchange.start

        def watch(self, t, recvs, sends):
            posted.append(len(recvs) + len(sends))
            return start(self, t, recvs, sends)

        GlooExchange.start = watch
        return run_rank(one.rank, one.group, p, inputs)[0], posted

    packed = on_ranks(4, attend, p, inputs)
    monkeypatch.setattr("tasp_core.runtime.packing.SMALL_BYTES", 0)
    single = on_ranks(4, attend, p, inputs)
    for (a, some), (b, many) in zip(packed, single, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert sum(some) < sum(many)


@pytest.mark.parametrize("dims", [(2, 8), (1, 6), (3, 3), (1, 1)])  # 16-byte rows, and others
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_parts_land_where_they_belong(dims, dtype):
    _, programs = kv_step()
    m = next(m for m in programs[0].steps[1].sends if len(m.ranges) > 1)
    buffer = torch.zeros(1000, *dims, dtype=dtype)
    rows = torch.arange(m.count * buffer[0].numel()).view(m.count, *dims).to(dtype)
    put_rows([m], rows, {"kv": buffer})
    assert torch.equal(take_rows([m], {"kv": buffer}), rows)
    assert torch.equal(torch.cat([buffer[low : low + n] for low, n in m.ranges]), rows)
    assert int((buffer != 0).any(dim=(1, 2)).sum()) <= m.count


# ---- results


def row(label, talk, whole, bound=0.9, error=0.05):
    samples = {"communication forward": [talk] * 3, "whole forward": [whole] * 3}
    samples["computation forward"] = [0.1] * 3
    predicted = {k: v[0] * (1 + error) for k, v in samples.items()} | {"bound forward": bound}
    return {"label": label, "samples": samples, "predicted": predicted}


def case(gain, group="mesh", mbit=20.0):
    return {
        "title": f"{group}: test, gain {gain}",
        "methods": [row("Ring", 7.0, 7.0), row("TASP", 1.0, 7.0 / gain)],
        "config": {"group": group, "link_mbit": mbit, "lengths": [64], "ranks": 8},
    }


def test_goals_are_met_or_not_by_the_worst_case():
    goals = {g.text: g for g in goals_of([case(6.9), case(5.0)])}
    least = goals["TASP end to end, 20 Mbit/s, ranks share cores, least CCR"]
    assert (least.found, least.met) == (pytest.approx(5.0), False)
    assert str(least).startswith("NOT MET")
    assert goals["prediction against measurement, ranks share cores, worst"].met
    assert not Goal("below", 1.0, 1.1, at_least=False).met
    assert Goal("below", 1.0, 0.9, at_least=False).met
    assert not Goal("nothing was measured", 1.0, float("nan")).met


def test_devices_take_their_time_beside_the_host_and_give_what_the_cpu_gives():
    p = tasp.plan(tasp.Documents.of([256]), 2, layout="zigzag")
    device = Device(1e-4)
    (step, *_), inputs = lower(p, 0).steps, Inputs.random(128, 4, 2, 16)
    call = step.compute.calls[0]
    took = CALL_S + FORWARD * call.pairs * 4 * 16 / 1e8
    first, again = (device.forward(*inputs.tensors()[:3], call, 0.25) for _ in range(2))
    cpu = device.kernel.forward(*inputs.tensors()[:3], call, 0.25)
    for got in (first, again):
        assert all(map(torch.equal, got, cpu))
    again[0].zero_()  # callers may write into what they get
    device.finish()
    wall, work = time.perf_counter(), time.thread_time()
    time.sleep(took / 2)  # a host that comes late does not delay what had its inputs
    third = device.forward(*inputs.tensors()[:3], call, 0.25)
    assert time.perf_counter() - wall < 0.9 * took
    device.finish()
    wall, work = time.perf_counter() - wall, time.thread_time() - work
    assert torch.equal(third[0], cpu[0])
    assert took <= wall < 1.4 * took
    assert work < 0.5 * took
    assert device.backward(inputs.dout, *inputs.tensors()[:3], *cpu, call, 0.25)[0].any()


def test_a_pass_lasts_until_its_device_is_done():
    p, inputs = tasp.plan([64], 1), Inputs.random(64, 2, 2, 8)
    pairs = 64 * 65 // 2
    took = 2 * CALL_S + (FORWARD + BACKWARD) * pairs * 2 * 8 / 5e6
    device = Device(5e-6)
    run_rank(0, None, p, inputs, device)  # what a first backward imports takes longer
    _, seconds = run_rank(0, None, p, inputs, device)
    assert took <= seconds < 2 * took


def test_a_case_of_a_given_ccr_is_simulated_to_have_it():
    (found,) = {round(c.tflops * 1e3, 2) for c in cases() if c.group == "packed" and c.tflops}
    assert found == 40
    (one, *_) = (c for c in cases() if c.group == "devices" and not c.causal)
    for wanted in (0.05, 0.5, 1.0):
        one = one.with_ccr(wanted)
        on = replace(one.on(), **(one.device() | {"latency_s": 0.0, "kernel_s": 0.0}))
        sizes = {"heads": one.heads, "kv_heads": one.kv_heads, "head_dim": one.head_dim}
        t = tasp.simulate(one.methods[0].plan(one.docs, on), on, dtype="float32", **sizes)
        assert t.compute_s / t.comm_s == pytest.approx(wanted, rel=1e-6)
        assert "GFLOP/s" in str(one)


def test_ccr_and_gaps_and_table():
    one = case(7.0)
    assert case_ccr(one) == pytest.approx(0.1 / 7.0)
    assert [round(gap, 6) for _, gap in gaps([one])] == [0.05] * 4
    assert "7.000 [7.000 7.000]" in table(one)
    assert table(one).count("\n") == 2


def result(path, kind, **body):
    path.write_text(json.dumps({"schema": 1, "kind": kind, **body}))


def test_result_files_become_one_table_and_curves(tmp_path):
    result(tmp_path / "a.json", "fabric", cases=[case(6.0), case(3.0, mbit=50.0)])
    config = {"ranks": 4, "causal": True, "heads": 8, "kv_heads": 8}
    rows = [
        row(label, talk * n, n, bound=0.5 * n) | {"tokens": 64 * n, "ccr": 0.1}
        for n in (1, 2)
        for label, talk in (("ring", 3.0), ("tasp", 1.0))
    ]
    result(tmp_path / "b.json", "attention", config=config, rows=rows)
    result(tmp_path / "c.json", "demo")
    (tmp_path / "d.json").write_text("{")
    found, skipped = collect(tmp_path)
    assert skipped.keys() == {"c.json", "d.json"}
    assert {f.how for f in found} == {"measured", "modelled", "bound"}
    header, *lines = write_csv(found, tmp_path / "r.csv").read_text().splitlines()
    assert header == (
        "file,kind,case,method,tokens,ranks,ccr,quantity,how,unit,samples,median,least,most"
    )
    assert len(lines) == len(found)
    figures = dict(curves(found))
    assert figures.keys() == {"time", "speedup"}
    assert figures["speedup"].svg.count('class="published"') == len(PUBLISHED)
    assert [b for _, b in gains(found)["TASP over Ring"]] == [
        pytest.approx(6.0),
        pytest.approx(3.0),
    ]
    with pytest.raises(PlanError, match="no result file"):
        collect(tmp_path / "nowhere")


def compared(name: str, machine: str, **seconds: float) -> dict:
    """A case that compares methods, of whole passes only, as `fabric bench` writes it."""
    methods = [
        {
            "label": label,
            "samples": {"whole forward": [x, x], "whole backward": [2 * x, 2 * x]},
            "predicted": {"whole forward": x, "whole backward": 2 * x, "bound forward": None},
        }
        for label, x in seconds.items()
    ]
    config = {"group": f"peers, {name}", "lengths": [8, 56], "ranks": 8, "tflops": 0.02}
    return {
        "title": f"peers, {name}: {machine}@64.3Mbit, 64 tokens in 2 documents, causal",
        "methods": methods,
        "config": config,
    }


def test_methods_compared_on_packed_sequences(tmp_path):
    seconds = {"Zigzag-Ring": 9.0, "DistFlashAttn": 2.0, "Ulysses": 1.5, "USP": 3.0}
    one = compared("sft", "mesh4x2", **seconds, SAP=0.6, HSAP=0.5)
    other = compared("giant", "mesh2x4", **seconds, SAP=1.2, HSAP=1.6)
    goals = {g.text.split(",")[0]: g.found for g in goals_of([one, other])}
    assert goals["HSAP or SAP against Ulysses"] == pytest.approx(1.25)
    assert goals["HSAP or SAP against DistFlashAttn"] == pytest.approx(2.0 / 1.2)
    assert "0.500 [0.500 0.500]" in table(one)
    assert table(one).count("\n") == 12
    result(tmp_path / "a.json", "fabric", cases=[one, other])
    found, _ = collect(tmp_path)
    assert totals(found)[one["title"]]["HSAP"] == pytest.approx(1.5)
    figure = peers(found)
    assert figure.svg.count('class="measured"') == 12
    assert "3.00 x as fast" in figure.svg
    assert "1.25 x as fast" in figure.svg
    assert peers([]) is None
    titles = [str(c) for c in cases() if c.group.startswith("peers")]
    assert len(titles) == len(set(titles)) == 6


def test_steps_are_simulated_by_buffers_and_by_their_number(monkeypatch):
    for name, value in (("MACHINES", ("mesh4",)), ("MANY_RANKS", "mesh2x2"), ("TOKENS", 1024)):
        monkeypatch.setattr(steps_bench, name, value)
    monkeypatch.setattr(steps_bench, "LONG", 2048)
    lines: list[str] = []
    tables = steps_bench.steps(lines.append)["tables"]
    assert {name: len(rows) for name, rows in tables.items()} == {
        "buffers, balanced": 16,
        "buffers, contiguous": 16,
        "long": 8,
        "steps": 10,
    }
    assert len(lines) == 1 + 16 + 16 + 8 + 10
    for row in tables["buffers, balanced"]:
        assert row["peak_travelling_kv"] <= int(row["varied"].split()[0])
        assert row["forward"]["over_bound"] >= 1 - 1e-9
        assert row["total_s"] == row["forward"]["total_s"] + row["backward"]["total_s"]
