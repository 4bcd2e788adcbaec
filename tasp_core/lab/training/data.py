"""Training data: packed sequences of bytes from text files, and each rank's batches of them.

    corpus = Corpus.of(["books/", "notes.txt", "chats.jsonl"])        # no path: Python's own manual
    train, held_out = corpus.split()
    for batch in ahead(batches(train, 65536, 1, make_plan, rank=rank)):   # goes on from batch.cursor
        ...

A document is a text file, or a line {"prompt": ..., "response": ...} of a .jsonl file; a token is a byte.
Documents come in a new order each epoch; one that does not fit is cut, and the rest of it begins the next
sequence as a document of its own. Not covered: tokenizers; shards of a data set, as every rank reads all.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from queue import Queue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...errors import PlanError
from ...planning.plan import Plan
from ...sequence.documents import Documents

T = TypeVar("T")
IGNORE = -100  # the label of a token without a target


class Item(NamedTuple):
    """Where a document is: `size` bytes of a file from `low` on, or a topic of the manual."""

    path: str
    low: int
    size: int


@dataclass(frozen=True)
class Corpus:
    """Documents of text files; only their places are held, texts are read when they are needed."""

    items: tuple[Item, ...]

    @classmethod
    def of(cls, paths: Sequence[str | Path] = ()) -> Corpus:
        """All documents of the files, and of the files in folders; without paths the manual's topics.

        Raises:
            PlanError: a path that does not exist, or no text at all.
        """
        if not paths:
            return cls(tuple(Item(n, -1, len(_topic(n)[0])) for n in sorted(topics)))
        items: list[Item] = []
        for root in map(Path, paths):
            if not root.exists():
                raise PlanError(f"no data file or folder {str(root)!r}")
            files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
            for path in files:
                if path.suffix == ".jsonl":
                    items += _lines(path)
                else:
                    items.append(Item(str(path), 0, path.stat().st_size))
        items = [item for item in items if item.size]
        if not items:
            raise PlanError(f"no text in {', '.join(map(str, paths))}")
        return cls(tuple(items))

    def split(self, held_out: int = 20) -> tuple[Corpus, Corpus]:
        """Documents to train on, and those held out: every `held_out`-th in a shuffled order."""
        order = np.random.default_rng(held_out).permutation(len(self.items))
        part = {int(i) for i in order[::held_out]} if len(order) > 1 else set()
        train = (x for i, x in enumerate(self.items) if i not in part)
        return Corpus(tuple(train)), Corpus(tuple(self.items[i] for i in sorted(part)))

    def fingerprint(self) -> str:
        """Hex digest of names and sizes."""
        return hashlib.sha256(json.dumps(self.items).encode()).hexdigest()[:16]

    def read(self, index: int) -> tuple[bytes, int]:
        """A document's bytes, and how many of them are its prompt.

        Raises:
            PlanError: a file that is gone or was changed, or bytes that are not text.
        """
        item = self.items[index]
        if item.low < 0:
            return _topic(item.path)
        try:
            with open(item.path, "rb") as file:
                file.seek(item.low)
                data = file.read(item.size)
        except OSError as error:
            raise PlanError(f"data file {item.path!r} cannot be read: {error.strerror}") from None
        if len(data) != item.size:
            raise PlanError(f"data file {item.path!r} is shorter than when it was listed")
        return _parse(item, data)


def _topic(name: str) -> tuple[bytes, int]:
    """A topic of Python's manual; its title is the prompt."""
    title = f"{name}:\n".encode()
    return title + topics[name].strip().encode(), len(title)


def _lines(path: Path) -> list[Item]:
    """The lines of a .jsonl file."""
    items, low = [], 0
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                items.append(Item(str(path), low, len(line)))
            low += len(line)
    return items


def _parse(item: Item, data: bytes) -> tuple[bytes, int]:
    """A document's bytes, and how many of them are its prompt."""
    where = f"data file {item.path!r}"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise PlanError(
            f"{where} is not UTF-8 text: byte {data[error.start]:#04x} at {item.low + error.start}"
        ) from None
    if not item.path.endswith(".jsonl"):
        return data, 0
    try:
        line = json.loads(text)
        prompt, response = line["prompt"].encode(), line["response"].encode()
        if not prompt + response:
            raise KeyError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PlanError(
            f'{where}, byte {item.low}: not a line like {{"prompt": "...", "response": "..."}}'
        ) from None
    return prompt + response, len(prompt)


class Cursor(NamedTuple):
    """Where a stream goes on: a document of an epoch's order, from its byte `offset`."""

    epoch: int = 0
    document: int = 0
    offset: int = 0


class PackedSequence(NamedTuple):
    """ids uint8 [T], which of them are prompt bool [T], and where the next sequence begins."""

    ids: np.ndarray
    prompt: np.ndarray
    docs: Documents
    cursor: Cursor


def packed_sequences(
    corpus: Corpus, tokens: int, *, seed: int = 0, cursor: Cursor | None = None
) -> Iterator[PackedSequence]:
    """Sequences of exactly `tokens` bytes, without end, from `cursor` on.

    Equal arguments give equal sequences, so every rank makes all of them and no rank has to send any.

    Raises:
        PlanError: no document at all, or one that `Corpus.read` refuses.

    >>> sequence = next(packed_sequences(Corpus.of(), 4096))
    >>> sequence.docs.total, len(sequence.ids), len(sequence.docs.lengths) > 1
    (4096, 4096, True)
    """
    if not corpus.items or tokens < 1:
        raise PlanError(f"no sequences of {tokens} tokens from {len(corpus.items)} documents")
    at = cursor or Cursor()
    order = _order(corpus, seed, at.epoch)
    data, prompt = corpus.read(order[at.document])
    while True:
        parts: list[np.ndarray] = []
        prompts: list[np.ndarray] = []
        left = tokens
        while left:
            part = np.frombuffer(data, dtype=np.uint8)[at.offset : at.offset + left]
            parts.append(part)
            prompts.append(np.arange(at.offset, at.offset + len(part)) < prompt)
            left -= len(part)
            at = at._replace(offset=at.offset + len(part))
            if at.offset == len(data):
                at = Cursor(at.epoch, at.document + 1)
                if at.document == len(order):
                    at = Cursor(at.epoch + 1)
                    order = _order(corpus, seed, at.epoch)
                data, prompt = corpus.read(order[at.document])
        docs = Documents.of([len(p) for p in parts])
        yield PackedSequence(np.concatenate(parts), np.concatenate(prompts), docs, at)


def _order(corpus: Corpus, seed: int, epoch: int) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(len(corpus.items)).tolist()


class Local(NamedTuple):
    """A rank's tokens of a packed sequence: ids, labels and positions int64 [t]; and its plan."""

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    plan: Plan


class Batch(NamedTuple):
    """A training step: its rows (packed sequences) on this rank, and totals over the rows of all ranks."""

    rows: tuple[Local, ...]
    targets: int  # tokens with a label
    tokens: int
    documents: int
    pairs: int  # visible (query, key) pairs
    cursor: Cursor


def batches(
    corpus: Corpus,
    tokens: int,
    rows: int,
    make_plan: Callable[[Documents], Plan],
    *,
    rank: int = 0,
    part: int = 0,
    parts: int = 1,
    sft: bool = False,
    seed: int = 0,
    cursor: Cursor | None = None,
) -> Iterator[Batch]:
    """Training steps of `rows` packed sequences each, without end; they do not depend on the ranks.

    Args:
        tokens: of each sequence. make_plan: documents -> their plan.
        rank: this one among the ranks that share a sequence.
        part, parts: this data-parallel group takes every parts-th row, from `part` on; parts divides rows.
        sft: tokens of prompts are no targets.
    """
    stream = packed_sequences(corpus, tokens, seed=seed, cursor=cursor)
    while True:
        step = [next(stream) for _ in range(rows)]
        labels = [labels_of(row, sft=sft) for row in step]
        local = []
        for row, target in list(zip(step, labels, strict=True))[part::parts]:
            plan = make_plan(row.docs)
            own = plan.tokens(rank)
            ids = row.ids[own].astype(np.int64)
            local.append(Local(ids, target[own], plan.positions(rank), plan))
        yield Batch(
            tuple(local),
            sum(int((x != IGNORE).sum()) for x in labels),
            tokens * rows,
            sum(len(row.docs.lengths) for row in step),
            sum(row.docs.num_pairs for row in step),
            step[-1].cursor,
        )


def labels_of(sequence: PackedSequence, *, sft: bool) -> np.ndarray:
    """Each token's successor in its document, int64 [T]; -100 at ends and, with `sft`, before prompts.

    >>> ids, prompt = np.uint8([5, 6, 7, 8]), np.bool_([1, 1, 0, 0])
    >>> labels_of(PackedSequence(ids, prompt, Documents.of([3, 1]), Cursor()), sft=True).tolist()
    [-100, 7, -100, -100]
    """
    target = sequence.ids.astype(np.int64)
    if sft:
        target[sequence.prompt] = IGNORE
    labels = np.append(target[1:], IGNORE)
    labels[sequence.docs.cu_seqlens[1:] - 1] = IGNORE
    return labels


def ahead(items: Iterable[T], depth: int = 1) -> Iterator[T]:
    """The same items, made `depth` ahead in a thread; an error is raised where its item would have come.

    >>> list(ahead(range(3)))
    [0, 1, 2]
    """
    queue: Queue[tuple[bool, Any]] = Queue(maxsize=depth)

    def work() -> None:
        try:
            for item in items:
                queue.put((True, item))
            queue.put((False, StopIteration()))
        except Exception as error:  # handed over, and raised where the items are used
            queue.put((False, error))

    Thread(target=work, daemon=True).start()
    while True:
        fine, item = queue.get()
        if fine:
            yield item
        elif isinstance(item, StopIteration):
            return
        else:
            raise item


def manual_sequence(tokens: int, first: int = 0) -> tuple[np.ndarray, Documents]:
    """A packed sequence of `tokens` bytes: topics of Python's manual, shuffled, the last one cut to fit.

    Args:
        first: where in the shuffled order to begin; the order repeats.

    Returns:
        ids int64 [tokens] in 0..255, and their documents.

    >>> ids, docs = manual_sequence(4096)
    >>> docs.total, len(ids), len(docs.lengths) > 2
    (4096, 4096, True)
    """
    if tokens < 1:
        raise PlanError(f"a packed sequence needs at least 1 token, got {tokens}")
    names = sorted(topics)
    random.Random(7).shuffle(names)
    parts: list[np.ndarray] = []
    left = tokens
    while left > 0:
        text = topics[names[(first + len(parts)) % len(names)]].strip().encode()
        part = np.frombuffer(text, dtype=np.uint8)[:left].astype(np.int64)
        parts.append(part)
        left -= len(part)
    return np.concatenate(parts), Documents.of([len(p) for p in parts])
