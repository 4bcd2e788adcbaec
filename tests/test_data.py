"""Packed rows from text files: what they hold, how they are spread, what cannot be read."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

import tasp_core as tasp
from tasp_core.lab.training.data import IGNORE, Corpus, ahead, batches, packed_sequences


def test_rows_are_all_of_the_text_once_an_epoch(tmp_path):
    texts = {"a.txt": "alpha " * 9, "b/c.txt": "gamma", "b/d.md": "d", "empty.txt": ""}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    corpus = Corpus.of([tmp_path])
    total = sum(map(len, texts.values()))
    stream = packed_sequences(corpus, 7)
    rows = [next(stream) for _ in range(3 * total)]  # 21 epochs
    text = b"".join(row.ids.tobytes() for row in rows)
    for epoch in range(21):
        part = text[epoch * total : (epoch + 1) * total].decode()
        for word in texts.values():
            assert word in part
    assert all(row.docs.total == 7 == len(row.ids) for row in rows)
    orders = {text[e * total : (e + 1) * total] for e in range(21)}
    assert len(orders) > 1
    for i in (0, 11, 50):  # a stream goes on where its cursor says
        again = packed_sequences(corpus, 7, cursor=rows[i].cursor)
        for row in rows[i + 1 : i + 20]:
            found = next(again)
            assert found.ids.tobytes() == row.ids.tobytes()
            assert found[2:] == row[2:]


def test_the_manual_is_split_into_what_is_trained_on_and_what_is_held_out():
    train, held = Corpus.of().split()
    assert len(train.items) + len(held.items) == len(Corpus.of().items)
    assert not {*train.items} & {*held.items}
    assert len(held.items) == -(-len(Corpus.of().items) // 20)
    assert train.fingerprint() != held.fingerprint()


@pytest.mark.parametrize("sft", [False, True])
def test_steps_are_the_same_rows_however_they_are_spread(tmp_path, sft):
    lines = [{"prompt": "p" * n, "response": "r" * (9 - n % 4)} for n in range(12)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    corpus = Corpus.of([tmp_path / "x.jsonl"])
    whole = next(batches(corpus, 40, 4, partial(tasp.plan, ranks=1), sft=sft))
    for parts, ranks in ((1, 3), (2, 2), (4, 1)):
        for part in range(parts):
            made = [
                next(
                    batches(
                        corpus,
                        40,
                        4,
                        partial(tasp.plan, ranks=ranks),
                        rank=r,
                        part=part,
                        parts=parts,
                        sft=sft,
                    )
                )
                for r in range(ranks)
            ]
            assert all(b[1:] == whole[1:] for b in made)
            for i, row in enumerate(whole.rows[part::parts]):
                for name in ("ids", "labels", "positions"):
                    pieces = [torch.from_numpy(getattr(b.rows[i], name)) for b in made]
                    assert (
                        tasp.unshard(pieces, made[0].rows[i].plan).tolist()
                        == getattr(row, name).tolist()
                    )
    targets = sum(int((r.labels != IGNORE).sum()) for r in whole.rows)
    assert whole.targets == targets
    trained = {chr(x) for r in whole.rows for x in r.labels[r.labels != IGNORE]}
    assert trained == ({"r"} if sft else {"p", "r"})


def test_ahead_keeps_the_order_and_hands_errors_over():
    def numbers():
        yield from range(5)
        raise tasp.PlanError("no more")

    stream = ahead(numbers(), depth=2)
    assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(tasp.PlanError, match="no more"):
        next(stream)


def test_data_that_cannot_be_read_is_named(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("fine " * 20)
    bad.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(tasp.PlanError, match=r"bad.txt' is not UTF-8 text: byte 0xe9 at 3"):
        [
            row
            for row, _ in zip(packed_sequences(Corpus.of([tmp_path]), 10), range(30), strict=False)
        ]
    corpus = Corpus.of([good])
    stream = packed_sequences(corpus, 30)
    next(stream)
    good.unlink()
    with pytest.raises(tasp.PlanError, match=r"good.txt' cannot be read: No such file"):
        [next(stream) for _ in range(9)]
    good.write_text("fine")
    with pytest.raises(tasp.PlanError, match="shorter than when it was listed"):
        next(packed_sequences(corpus, 30))
    chat = tmp_path / "chat.jsonl"
    for line in (
        '{"prompt": "a"}',
        "[]",
        '{"prompt": 1, "response": "b"}',
        '{"prompt": "", "response": ""}',
    ):
        chat.write_text('{"prompt": "a", "response": "b"}\n' + line)
        with pytest.raises(tasp.PlanError, match=r"chat.jsonl', byte 33: not a line like"):
            [row for row, _ in zip(packed_sequences(Corpus.of([chat]), 9), range(9), strict=False)]
    for missing in (tmp_path / "none", bad.with_suffix(".empty")):
        (tmp_path / "bad.empty").touch()
        with pytest.raises(tasp.PlanError, match=r"no data file|no text in"):
            Corpus.of([missing])
