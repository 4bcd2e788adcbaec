"""Messages pair up: NCCL has no tags, so between two ranks the first send meets the first receive.

`check` proves it of every plan on hop tables; here programs are held against each other too, as they
post their messages, over schedules x layouts x masks x machines, and planted faults must be found.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from spread import spread

import tasp_core as tasp
from tasp_core import Documents, Plan, PlanError, check, lower, plan
from tasp_core.lowering.program import Program, Recv
from tasp_core.runtime import packing as posting
from tasp_core.schedules import DKV, KINDS, KV, Hops, Schedule, Table

RANKS = (2, 3, 4, 6, 8, 16)
ROWS = {
    "one giant": (2048,),
    "a giant and dwarfs": (1500, 3, 40, 1, 0, 504),
    "many": (137, 641, 89, 13, 1, 752, 415),
    "tiny": tuple(random.Random(5).choices(range(1, 40), k=60)),
}
MASKS = {"causal": {}, "full": {"causal": False}, "window": {"window": 50}}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "sap": ({"relay": 3}, {"relay": 2, "buffer_tokens": 300}, {"move_q": True}, {"move_q": False}),
    "wave": ({"blocks": 2, "twins": 0}, {"blocks": 3, "twins": 1}),
    "mesh": ({"rows": 1},),
    "double_ring": ({"rings": "ring"},),
    "trees": ({"shares": 2},),
}
H, K, D = 4, 2, 16  # query heads, kv heads, head dim


def every_plan(
    ranks: Iterable[int] = RANKS, layouts: Iterable[str] = tuple(tasp.layouts())
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of each plan that there is: label, and keywords of tasp.plan."""
    for p, name, layout in itertools.product(ranks, tasp.schedules(), layouts):
        for machine in (None, *([f"mesh{p // 2}x2"] if p % 2 == 0 and p > 2 else [])):
            for row, mask, options in itertools.product(ROWS, MASKS, ({}, *OPTIONS.get(name, ()))):
                label = (
                    f"{name} {options or ''} x {layout} {p} {machine or 'one node'} {row} {mask}"
                )
                keywords = {
                    "docs": Documents.of(ROWS[row], **MASKS[mask]),
                    "ranks": p,
                    "schedule": name,
                    "layout": layout,
                    "machine": machine,
                    "schedule_options": options,
                }
                yield label, keywords


def buffers(program: Program, backward: bool) -> dict[str, torch.Tensor]:
    """The buffers of a pass in bf16, without memory; execute.py's, which nccl_double.py runs."""

    def rows(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(count, *shape, dtype=dtype, device="meta")

    wide = torch.float32
    answer = D if backward else D + 1
    return {
        "kv": rows(program.tokens + program.kv_buffer_rows, K, 2 * D),
        "q": rows(program.tokens + program.remote_query_rows, H, 3 * D + 2 if backward else D),
        "dkv": rows(program.tokens + program.remote_grad_rows, K, 2 * D, dtype=wide),
        "dkv_recv": rows(program.grad_receive_rows, K, 2 * D),  # as grad_comm_dtype has it
        "partial_send": rows(program.remote_query_rows, H, answer, dtype=wide),
        "dq": rows(program.tokens + program.remote_query_rows, H, D, dtype=wide),
        "partial_recv": rows(program.received_partial_rows, H, answer, dtype=wide),
    }


def posted(messages: Any, rows: dict[str, torch.Tensor], *, receive: bool) -> dict[int, list[Any]]:
    """What is posted to or from each peer, in order, by all that both ends must agree on."""
    found: dict[int, list[Any]] = defaultdict(list)
    for message in posting.packed_messages(messages, rows, receive=receive)[0]:
        m, shape = message.message, tuple(message.rows.shape)
        name = f"{KINDS[m.kind]}{m.owner}.{m.share}" + " and more" * (len(m.ranges) > 1)
        found[m.peer].append((name, m.count, shape, message.rows.dtype, message.tag))
    return found


def mispaired(programs: list[Program], *, backward: bool) -> tuple[int, list[str]]:
    """Messages whose two ends were compared, and in words those that do not pair up."""
    rows = [buffers(program, backward) for program in programs]
    count, wrong = 0, []
    for t in range(max(len(program.steps) for program in programs)):
        sends, recvs = {}, {}
        for program, mine in zip(programs, rows, strict=True):
            if t < len(program.steps):
                step, rank = program.steps[t], program.rank
                for peer, some in posted(step.sends, mine, receive=False).items():
                    sends[rank, peer] = some
                for peer, some in posted(step.recvs, mine, receive=True).items():
                    recvs[peer, rank] = some
        for link in sends.keys() | recvs.keys():
            one, other = sends.get(link, []), recvs.get(link, [])
            count += max(len(one), len(other))
            if one != other:
                wrong.append(f"step {t}, {link[0]}>{link[1]}: {one} meets {other}")
    return count, wrong


def mispaired_plan(p: Plan) -> tuple[int, list[str]]:
    """The same of all programs of a plan: both passes, with and without keep_kv."""
    count, wrong = 0, []
    for backward, keep in itertools.product((False, True), repeat=2):
        programs = [
            lower(p.context_plan, rank, backward=backward, keep_kv=keep)
            for rank in range(p.context_plan.ranks)
        ]
        more, found = mispaired(programs, backward=backward)
        count += more
        wrong += [f"backward={backward} keep_kv={keep}: {text}" for text in found]
    return count, wrong


def run(
    some: Iterable[tuple[str, dict[str, Any]]], monkeypatch: Any, *, lowered: int = 1
) -> tuple[int, int, int]:
    """Plans proved by `check`, hops in them, messages of programs compared: of each `lowered`-th plan.

    Small messages are gathered in some programs and divided in others.
    """
    # what is computed does not change what is sent, and takes most of the time of lowering
    monkeypatch.setattr(sys.modules["tasp_core.lowering.passes"], "attend", lambda *_, **__: None)
    plans = hops = messages = 0
    for label, keywords in some:
        if not tasp.supports(**keywords):
            continue
        p = plan(**keywords)
        check(p)
        if plans % lowered == 0:
            monkeypatch.setattr(posting, "SMALL_BYTES", (1 << 20, 1 << 12)[plans // lowered % 2])
            count, wrong = mispaired_plan(p)
            assert not wrong, (label, wrong[:3])
            messages += count
        plans += 1
        hops += sum(len(p.hops(backward=backward).step) for backward in (False, True))
    return plans, hops, messages


def test_messages_pair_up(monkeypatch):
    some = random.Random(1).sample([*every_plan(RANKS[:-1])], 160)
    plans, hops, messages = run(some, monkeypatch, lowered=2)
    assert plans > 100
    assert min(hops, messages) > 10_000


@pytest.mark.full
@pytest.mark.parametrize("layout", list(tasp.layouts()))
@pytest.mark.parametrize(("ranks", "lowered"), [(2, 1), (3, 1), (4, 1), (6, 3), (8, 5), (16, 17)])
def test_messages_of_every_plan_pair_up(ranks, lowered, layout, monkeypatch, capsys):
    some = every_plan((ranks,), (layout,))
    plans, hops, messages = run(some, monkeypatch, lowered=lowered)
    with capsys.disabled():
        print(
            f"\n{ranks} ranks, {layout}: {plans} plans with {hops} hops proved, {messages} messages "
            f"of every {lowered}. plan's programs compared: 0 mispaired"
        )
    assert plans > 100
    assert min(hops, messages) > 1_000


# ---- the cases that mispaired: large messages went before small ones, in the order of other peers


GIANT = {
    "zigzag relay": {"schedule_options": {"relay": 3}},
    "balanced relay": {"layout": "balanced", "schedule_options": {"relay": 3}},
    "striped relay": {"layout": "striped", "schedule_options": {"relay": 3}, "ranks": 6},
    "contiguous 2x2": {"layout": "contiguous", "machine": "mesh2x2", "causal": False},
    "contiguous 3x2": {
        "layout": "contiguous",
        "machine": "mesh3x2",
        "causal": False,
        "ranks": 6,
        "docs": (4096,),
    },
}


@pytest.mark.parametrize(
    ("name", "small"), spread(itertools.product(GIANT, (1 << 14, 1 << 20)), keep=5)
)
def test_giant_documents_over_relays_and_nodes(name, small, monkeypatch):
    monkeypatch.setattr(posting, "SMALL_BYTES", small)
    keywords: dict[str, Any] = {"ranks": 4, "docs": (3000, 1096), "causal": True, **GIANT[name]}
    docs = Documents.of(keywords.pop("docs"), causal=keywords.pop("causal"))
    count, wrong = mispaired_plan(plan(docs, schedule="sap", **keywords))
    assert count > 100
    assert not wrong, wrong[:2]


# ---- planted faults


@dataclass(frozen=True)
class Altered(Table):
    """A table that one rank reads otherwise in one pass: `changed` is that rank's table."""

    reader: int | None = 0
    in_backward: bool = False
    changed: tuple[str, ...] = ()

    def hops(self, rank: int | None = None, *, backward: bool = False) -> Hops:
        if (rank, backward) == (self.reader, self.in_backward):
            return Hops.parse(self.changed)  # as it stands, not put in order
        return super().hops(rank, backward=backward)


def altered(p: Plan, reader: int | None, backward: bool, changed: list[str]) -> Plan:
    """The plan as a table, which `reader` reads as `changed` in one pass."""
    table = p.with_hops(p.hops(backward=True).lines()).schedule
    assert isinstance(table, Table)
    names = ("ranks", "node_size", "exchange", "lines", "shares", "claim", "like")
    fields = {name: getattr(table, name) for name in names}
    schedule = Altered(**fields, reader=reader, in_backward=backward, changed=tuple(changed))
    return replace(p, schedule=schedule)


def faults(p: Plan, reader: int, backward: bool) -> dict[str, tuple[list[str], str]]:
    """Changed tables of a rank, by kind of fault, and the first hop at which each of them differs."""
    hops = p.hops(reader, backward=backward)
    words, found = hops.lines(), {}
    links = [tuple(c) for c in np.stack([hops.step, hops.src, hops.dst], axis=1).tolist()]
    for i, word in enumerate(words):
        rest = words[i + 1 :]
        found.setdefault("dropped", (words[:i] + rest, word))
        found.setdefault("twice", ([*words[: i + 1], word, *rest], word))
        if rest and links[i] == links[i + 1]:
            found.setdefault("swapped", ([*words[:i], rest[0], word, *rest[1:]], word))
        head, _, share = word.rpartition(".")
        other = f"{head}.{(int(share) + 1) % p.schedule.num_shares}"
        if other != word and other not in words:
            found.setdefault("another share", ([*words[:i], other, *rest], word))
    return found


PLANTED = {
    "ring": {},
    "tasp": {},
    "wave": {"schedule_options": {"blocks": 2}},
    "mesh": {"layout": "contiguous"},
    "sap": {"schedule_options": {"relay": 3}, "layout": "balanced"},
    "token_ring": {"layout": "striped"},
    "trees": {"machine": "mesh2x2"},
}


@pytest.mark.parametrize("name", PLANTED)
def test_check_finds_what_two_ranks_read_differently(name):
    p = plan([300, 20], 4, schedule=name, **PLANTED[name])
    assert check(altered(p, 1, False, p.hops(1).lines()))  # a table that says the same is right
    seen = set()
    for backward, reader in itertools.product((False, True), range(4)):
        for fault, (words, hop) in faults(p, reader, backward).items():
            with pytest.raises(PlanError) as caught:
                check(altered(p, reader, backward, words))
            text = str(caught.value).splitlines()
            step, link, what = hop.split()
            src, dst = link.split(">")
            assert f"in step {step[1:]}, message " in text[0], (fault, hop, text[0])
            assert f"from rank {src} to rank {dst}: rank {src} sends " in text[0]
            assert f", rank {dst} expects " in text[0]
            assert what in text[0]
            assert any(line.split()[:2] == [step[1:], "<--"] for line in text[1:])
            seen.add(fault)
    shared = name not in (
        "wave",
        "mesh",
        "token_ring",
    )  # links that carry more than one hop in a step
    assert {"dropped", "twice", *["swapped"] * shared} <= seen


def test_the_error_says_both_messages():
    p = plan([64], 4, schedule="ring")
    words = p.hops(1, backward=True).lines()
    a, b = words.index("t2 0>1 kv2.0"), words.index("t2 0>1 dkv3.0")
    words[a], words[b] = words[b], words[a]
    with pytest.raises(PlanError) as caught:
        check(altered(p, 1, True, words))
    assert str(caught.value).splitlines()[0] == (
        "in step 2, message 0 from rank 0 to rank 1: rank 0 sends kv2.0 (16 tokens), rank 1 expects "
        "dkv3.0 (16 tokens). Messages of two ranks pair up in the order in which they are posted: list "
        "the hops of a link and step in one order in every rank's hop table, e.g. that of "
        "Hops.ordered()"
    )
    assert not mispaired_plan(p)[1]
    assert mispaired_plan(altered(p, 1, True, words))[1]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["t0 0>1 kv0.0", "t0 1>2 kv1.7"], "share outside 0..0"),
        (["t0 0>9 kv0.0"], "rank outside 0..3"),
        (["t1 0>1 kv3.0", "t0 0>1 kv0.0"], "order of its steps: t0 0>1 kv0.0 comes after t1 0>1"),
    ],
)
def test_tables_that_no_messages_can_be_made_of(words, reason):
    with pytest.raises(PlanError, match=reason):
        check(altered(plan([64], 4, schedule="ring"), 1, False, words))


def test_a_step_before_the_first():
    @dataclass(frozen=True)
    class Early(Table):
        def hops(self, rank: int | None = None, *, backward: bool = False) -> Hops:
            table = super().hops(rank, backward=backward)
            return table._replace(step=table.step - 1)

    p = plan([64], 4, schedule="ring")
    with pytest.raises(PlanError, match=r"a step outside 0\.\.999999 at t-1 0>1 kv0.0"):
        check(replace(p, schedule=Early(4, 4, lines=tuple(p.hops(backward=True).lines()))))


def test_what_all_ranks_read_and_the_table_of_all_does_not_say():
    """Everything else is proved of the table of all ranks: theirs must be the same."""

    @dataclass(frozen=True)
    class Both(Table):
        def hops(self, rank: int | None = None, *, backward: bool = False) -> Hops:
            if rank is None or backward:
                return super().hops(rank, backward=backward)
            words = [w for w in super().hops(rank).lines() if w != "t1 0>1 kv3.0"]
            return Hops.parse(words)

    p = plan([64], 4, schedule="ring")
    wrong = replace(p, schedule=Both(4, 4, lines=tuple(p.hops(backward=True).lines())))
    with pytest.raises(
        PlanError, match=r"step 1, .* sends nothing, the table of all ranks has kv3.0 \("
    ):
        check(wrong)


def test_a_program_that_posts_otherwise_is_seen():
    """The comparison of programs is one that can fail."""
    p = plan([64], 4, schedule="ring")
    programs = [lower(p, rank, backward=True) for rank in range(4)]
    assert mispaired(programs, backward=True)[1] == []
    first, second = (i for i in programs[1].steps[2].instructions if isinstance(i, Recv))
    assert [first.message.kind, second.message.kind] == [KV, DKV]
    short = replace(second, message=second.message._replace(count=15))
    for changed in ((second, first), (first,), (first, short)):
        others = [i for i in programs[1].instructions if i not in (first, second)]
        received = replace(programs[1], instructions=(*others, *changed))
        assert len(mispaired([programs[0], received, *programs[2:]], backward=True)[1]) == 1


def test_all_to_alls_that_end_before_the_last_hop():
    @dataclass(frozen=True)
    class Short(Table):
        def num_steps(self, *, backward: bool = False) -> int:
            return Schedule.num_steps(self, backward=backward) - 1

    p = plan([64], 4, schedule="ring", schedule_options={"exchange": "all_to_all"})
    words = tuple(p.hops(backward=True).lines())
    assert check(replace(p, schedule=Table(4, 4, "all_to_all", words)))
    with pytest.raises(PlanError, match=r"takes part in 2 all-to-alls, .* at t2 "):
        check(replace(p, schedule=Short(4, 4, "all_to_all", words)))
