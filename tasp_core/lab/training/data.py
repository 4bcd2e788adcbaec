"""Training data: packed rows of bytes from text files, and each rank's batches of them.

    corpus = Corpus.of(["books/", "notes.txt", "chats.jsonl"])       # nothing: Python's own manual
    for row in packed_rows(corpus.split()[0], tokens=65536, seed=0):  # goes on from row.cursor
        plan = tasp.plan(row.docs, ranks)

A document is a text file, or a line {"prompt": ..., "response": ...} of a .jsonl file. Documents come in
a new order each epoch; one that does not fit is cut, and the rest of it begins the next row as a
document of its own. `ahead` runs any of this in a thread, so that plans are ready when a step begins.
`batches` makes what a training step consumes: this rank's tokens, labels, positions and plans.
`manual_row` is a row without any file: Python's own manual, one topic per document, one byte per token.
Not covered: tokenizers, shards of a data set (every rank reads all of it).
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


class Item(NamedTuple):
    """Where a document is: `size` bytes of a file from `low` on, or a topic of the manual."""

    path: str
    low: int
    size: int


class Cursor(NamedTuple):
    """Where a stream goes on: a document of an epoch's order, from its byte `offset`."""

    epoch: int = 0
    document: int = 0
    offset: int = 0


class Row(NamedTuple):
    """One packed row: ids uint8 [T], which of them are prompt bool [T], and where the next row begins."""

    ids: np.ndarray
    prompt: np.ndarray
    docs: Documents
    cursor: Cursor


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
            from pydoc_data.topics import topics

            names = sorted(topics)
            return cls(tuple(Item(n, -1, len(_topic(n)[0])) for n in names))
        items: list[Item] = []
        for given in map(Path, paths):
            if not given.exists():
                raise PlanError(f"no data file or folder {str(given)!r}")
            files = (
                sorted(p for p in given.rglob("*") if p.is_file()) if given.is_dir() else [given]
            )
            for path in files:
                items += (
                    _lines(path)
                    if path.suffix == ".jsonl"
                    else [Item(str(path), 0, path.stat().st_size)]
                )
        items = [item for item in items if item.size]
        if not items:
            raise PlanError(f"no text in {', '.join(map(str, paths))}")
        return cls(tuple(items))

    def split(self, held_out: int = 20) -> tuple[Corpus, Corpus]:
        """Documents to train on, and every `held_out`-th, in a shuffled order, held out."""
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
    from pydoc_data.topics import topics

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


def packed_rows(
    corpus: Corpus, tokens: int, *, seed: int = 0, cursor: Cursor | None = None
) -> Iterator[Row]:
    """Rows of exactly `tokens` bytes, without end, from `cursor` on.

    Equal arguments give equal rows, so every rank can make all of them and no rank has to send any.

    Raises:
        PlanError: no document at all, or one that `Corpus.read` refuses.

    >>> row = next(packed_rows(Corpus.of(), 4096))
    >>> row.docs.total, len(row.ids), len(row.docs.lengths) > 1
    (4096, 4096, True)
    """
    if not corpus.items or tokens < 1:
        raise PlanError(f"no rows of {tokens} tokens from {len(corpus.items)} documents")
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
        yield Row(np.concatenate(parts), np.concatenate(prompts), docs, at)


def _order(corpus: Corpus, seed: int, epoch: int) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(len(corpus.items)).tolist()


def ahead(items: Iterable[T], depth: int = 1) -> Iterator[T]:
    """The same items, made `depth` ahead in a thread; an error comes where its item would have.

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


IGNORE = -100


class Local(NamedTuple):
    """A rank's tokens of a row: ids, labels and positions int64 [t]; and the row's plan."""

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    plan: Plan


class Batch(NamedTuple):
    """A step: the rank's share of its rows, and what is true of all rows of the step on every rank."""

    rows: tuple[Local, ...]
    targets: int  # labelled tokens of the step
    tokens: int
    documents: int
    pairs: int  # visible (query, key) pairs
    cursor: Cursor


def labels_of(row: Row, *, sft: bool) -> np.ndarray:
    """Each token's successor in its document, int64 [T]; -100 at ends, and with sft before prompt tokens.

    >>> row = Row(np.uint8([5, 6, 7, 8]), np.bool_([1, 1, 0, 0]), Documents.of([3, 1]), Cursor())
    >>> labels_of(row, sft=True).tolist()
    [-100, 7, -100, -100]
    """
    target = row.ids.astype(np.int64)
    if sft:
        target[row.prompt] = IGNORE
    labels = np.append(target[1:], IGNORE)
    labels[row.docs.cu_seqlens[1:] - 1] = IGNORE
    return labels


def batches(
    corpus: Corpus,
    tokens: int,
    rows: int,
    make: Callable[[Documents], Plan],
    *,
    rank: int = 0,
    part: int = 0,
    parts: int = 1,
    sft: bool = False,
    seed: int = 0,
    cursor: Cursor | None = None,
) -> Iterator[Batch]:
    """Steps of `rows` rows each, without end; the rows do not depend on how they are spread.

    Args:
        make: a row's documents -> its plan. rank: this one among those of a row.
        part, parts: this data-parallel part takes every parts-th row; parts divides rows.
    """
    stream = packed_rows(corpus, tokens, seed=seed, cursor=cursor)
    while True:
        step = [next(stream) for _ in range(rows)]
        labels = [labels_of(row, sft=sft) for row in step]
        mine = []
        for row, target in list(zip(step, labels, strict=True))[part::parts]:
            plan = make(row.docs)
            own = plan.tokens(rank)
            mine.append(
                Local(row.ids[own].astype(np.int64), target[own], plan.positions(rank), plan)
            )
        yield Batch(
            tuple(mine),
            sum(int((x != IGNORE).sum()) for x in labels),
            tokens * rows,
            sum(len(row.docs.lengths) for row in step),
            sum(row.docs.num_pairs for row in step),
            step[-1].cursor,
        )


def manual_row(tokens: int, first: int = 0) -> tuple[np.ndarray, Documents]:
    """A row of `tokens` byte tokens: manual topics in a shuffled order, the last one cut to fit.

    Args:
        first: where in the shuffled order to begin; the order repeats.

    Returns:
        ids int64 [tokens] in 0..255, and the row's documents.

    >>> ids, docs = manual_row(4096)
    >>> docs.total, len(ids), len(docs.lengths) > 2
    (4096, 4096, True)
    """
    if tokens < 1:
        raise PlanError(f"a row needs at least 1 token, got {tokens}")
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
