"""Masks: which (query, key) pairs of a packed row are visible, which rank computes them, and when.

    mask(plan)               the colour of a pair: the rank that computes it
    mask(plan, rank=3)       the pairs of rank 3: the step in which it computes them
    mask(docs)               the documents alone

Queries go down, keys go across, both in row order; counted by raster.py, whatever the length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tasp_core import Documents, Plan
from tasp_core.planning.work import own_steps

from .colours import PALE, SOFT, colour, ink, mix, ramp
from .figure import Figure, few_enough
from .marks import Drawing, Mark, Marks, rect, small, text
from .raster import (
    Grid,
    alternating,
    arrival,
    blocks,
    by_pairs,
    cover,
    holders,
    moved,
    pairs_by_rank,
    pairs_by_step,
    shares,
)

SIDE, STRIP, LEFT, TOP, SHADES = 600.0, 20.0, 56.0, 50.0, 4
MIXED, OTHERS, NEVER = "#8C8C8C", "#DADADA", "#000000"
RIGHT = LEFT + STRIP + SIDE + 40


class View(NamedTuple):
    """One way to colour the cells.

    weight: part of each cell's pairs of each kind, float [query cell, key cell, kind].
    mixed: whether a cell has no one kind but many, bool [query cell, key cell].
    tones, tips: colour and words of each kind.
    holder: the rank that holds each sampled token, int64 [cell, sample]; None: no ranks.
    """

    weight: np.ndarray
    mixed: np.ndarray
    tones: list[str]
    tips: list[str]
    holder: np.ndarray | None
    keys: list[tuple[str, str]]
    head: str
    notes: tuple[str, ...]


def _codes(weight: np.ndarray, mixed: np.ndarray) -> np.ndarray:
    """Which kind fills each cell, and how much: kind * SHADES + shade; the last kind: mixed."""
    whole, kinds = weight.sum(axis=2), weight.shape[2]
    top = np.where(mixed, kinds, weight.argmax(axis=2))
    shade = np.clip(np.ceil(whole * SHADES) - 1, 0, SHADES - 1).astype(np.int64)
    return np.where(whole > 0, top * SHADES + shade, -1)


def _cells(codes: np.ndarray, tones: list[str], tips: list[str]) -> Marks:
    """The rectangles; a paler one holds fewer visible pairs."""
    size, at, marks = SIDE / len(codes), complex(LEFT + STRIP, TOP + STRIP), []
    for code, top, bottom, left, right in blocks(codes):
        kind, shade = divmod(code, SHADES)
        fill = mix("#FFFFFF", tones[kind], 0.4 + 0.6 * (shade + 1) / SHADES)
        box = complex(right - left, bottom - top) * size
        where = at + complex(left, top) * size
        marks.append(rect(where, box, fill=fill, name="tile", tip=tips[kind]))
    return marks


def _strips(holder: np.ndarray, ranks: int) -> Marks:
    """Who holds the keys (above) and the queries (left), with numbers where they fit."""
    size, marks = SIDE / len(holder), []
    codes = np.where(alternating(holder), ranks, shares(holder, ranks).argmax(axis=1))
    for code, _, _, low, high in blocks(codes[None, :]):
        long, fill = (high - low) * size, MIXED if code == ranks else colour(code)
        across = complex(LEFT + STRIP + low * size, TOP)
        down = complex(LEFT, TOP + STRIP + low * size)
        for at, box in ((across, complex(long, STRIP - 3)), (down, complex(STRIP - 3, long))):
            marks.append(rect(at, box, fill=fill, stroke="#FFFFFF", width=0.5, name="holder"))
            if long >= 18 and code < ranks:
                marks.append(text(at + box / 2, str(code), size=13, bold=True, fill=ink(fill)))
    return marks


def _outlines(docs: Documents, grid: Grid) -> Marks:
    """The border of what is visible in each document that can be seen; a grid where cells are tokens."""
    unit, at = SIDE / max(1, docs.total), complex(LEFT + STRIP, TOP + STRIP)
    marks = [rect(at, complex(SIDE, SIDE), stroke="#999999")]
    mask, what = docs.mask, "document" if docs.slices is None else "slice"
    columns = (mask.q_start, mask.q_stop, mask.k_start, mask.k_stop, mask.low, mask.high)
    for top, bottom, left, right, low, high in zip(*(c.tolist() for c in columns), strict=True):
        if max(bottom - top, right - left) * unit < 5:
            continue
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        if not grid.exact and low > left - bottom + 1:
            corners = _clip(corners, low - 1, 1)
        if not grid.exact and high < right - 1 - top:
            corners = _clip(corners, high, -1)
        points = tuple(at + complex(x, y) * unit for x, y in corners)
        marks.append(Mark("shape", points, stroke=SOFT, width=0.8, name=what))
    return marks


def _clip(corners: list[tuple[float, float]], limit: float, sign: int) -> list[tuple[float, float]]:
    """The part of a polygon of (key, query) corners where sign * (key - query - limit) >= 0."""
    inside: list[tuple[float, float]] = []
    for (x0, y0), (x1, y1) in zip(corners, [*corners[1:], *corners[:1]], strict=True):
        before, after = sign * (x0 - y0 - limit), sign * (x1 - y1 - limit)
        if before >= 0:
            inside.append((x0, y0))
        if before * after < 0:
            part = before / (before - after)
            inside.append((x0 + part * (x1 - x0), y0 + part * (y1 - y0)))
    return inside


def _axes(docs: Documents) -> Marks:
    """Names of the axes and the row's ends."""
    start, end = LEFT + STRIP, LEFT + STRIP + SIDE
    marks = [small(complex((start + end) / 2, TOP - 30), "key (place in the row)")]
    middle = complex(LEFT - 36, TOP + STRIP + SIDE / 2)
    marks.append(text(middle, "query (place in the row)", size=13, fill=SOFT, turn=-90))
    marks += [small(complex(start, TOP - 11), "0", "start")]
    marks += [small(complex(end, TOP - 11), f"{docs.total:,}", "end")]
    return marks


def _key(at: float, swatch: str, words: str) -> Marks:
    where = complex(RIGHT, at)
    edge = PALE if swatch == "#FFFFFF" else "none"
    marks = [rect(where, 16 + 16j, fill=swatch, stroke=edge)]
    return [*marks, text(where + 24 + 8j, words, size=13, anchor="start")]


def _keys(head: str, rows: list[tuple[str, str]]) -> Marks:
    """The legend, right of the picture; long ones are cut in the middle."""
    marks: Marks = [text(complex(RIGHT, TOP), head, size=16, anchor="start", bold=True)]
    if len(rows) > 24:
        rows = [*rows[:12], ("", f"... {len(rows) - 22} more"), *rows[-10:]]
    for i, (swatch, words) in enumerate(rows):
        y = TOP + 24 + 24 * i
        if swatch:
            marks += _key(y, swatch, words)
        else:
            marks.append(small(complex(RIGHT + 24, y + 8), words, "start"))
    return marks


def _alone(docs: Documents, grid: Grid) -> View:
    """The documents, no plan."""
    weight = cover(docs, grid).mean(axis=1)[..., None]
    longest = np.argsort(-docs.lengths, kind="stable")[:12].tolist()
    keys = [("", f"document {d}: {docs.lengths[d]:,} tokens") for d in sorted(longest)]
    if docs.slices is None:
        note = "A document's tokens see tokens of their own document only"
        note += ", up to themselves." if docs.causal else "."
    else:
        note = f"What is visible is given by {len(docs.slices)} slices of queries and keys."
    mixed = np.zeros(weight.shape[:2], dtype=bool)
    return View(
        weight, mixed, [ramp(0.55)], ["visible"], None, keys, "the longest documents", (note,)
    )


def _by_rank(plan: Plan, grid: Grid) -> View:
    """The rank that computes each pair."""
    ranks, holder = plan.layout.ranks, holders(plan, grid)
    mixed = np.broadcast_to(alternating(holder)[:, None], (len(holder), len(holder)))
    if len(plan.schedule.offloaded.rank):
        seen, where, _ = moved(plan, grid)
        weight = np.stack([(seen & (where == r)).mean(axis=(1, 3)) for r in range(ranks)], axis=2)
    else:
        mine = holder[..., None] == np.arange(ranks)
        weight = np.einsum("irj,irk->ijk", cover(plan.docs, grid), mine) / len(holder[0])
    part = pairs_by_rank(plan) / max(1, plan.docs.num_pairs)
    tones, names = [colour(r) for r in range(ranks)], [f"rank {r}" for r in range(ranks)]
    keys = [(c, f"{n}: {p:.1%} of the pairs") for c, n, p in zip(tones, names, part, strict=True)]
    note = "A pair has the colour of the rank that computes it; the strips show who "
    note += "holds which tokens. Paler: part of the cell is not visible."
    note += " Grey: several ranks." * bool(mixed.any())
    return View(weight, mixed, tones, names, holder, keys, "computed by", (note,))


def _by_step(plan: Plan, grid: Grid, rank: int, step: int | None) -> View:
    """The step in which one rank computes its pairs."""
    holder, when = holders(plan, grid), arrival(plan, rank, grid.tokens)
    *done, never = pairs_by_step(plan, rank).tolist()
    seen, steps = cover(plan.docs, grid), len(done)
    if by_pairs(plan):
        pairs, where, at = moved(plan, grid)
        pairs &= where == rank
        own = np.stack([(pairs & (at == t)).mean(axis=(1, 3)) for t in [*range(steps), -1]], axis=2)
    else:
        part = shares(when, steps)
        rows = np.einsum("irj,ir->ij", seen, holder == rank) / len(holder[0])
        own = rows[..., None] * np.concatenate([part, 1 - part.sum(axis=1, keepdims=True)], axis=1)
    rest = np.where(own.any(axis=2), 0, seen.mean(axis=1))[..., None]
    tones = [ramp(0.25 + 0.75 * t / max(1, steps - 1)) for t in range(steps)]
    if step is not None:
        tones = [colour(rank) if t == step else mix(c, "#FFFFFF", 0.6) for t, c in enumerate(tones)]
    first = "" if own_steps(plan, backward=False)[rank].any() else " (own keys)"
    names = [f"step {t}" + first * (t == 0) for t in range(steps)]
    keys = [(c, f"{n}: {w:,} pairs") for c, n, w in zip(tones, names, done, strict=True)]
    keys += [(NEVER, f"never: {never:,} pairs")] if never else []
    note = f"Rank {rank} computes a pair once query and key are there. The strips show who holds which "
    note += "tokens. Paler: part of the cell is not visible, or not this rank's."
    many = (own[..., :-1] > 0).sum(axis=2) > 3 if by_pairs(plan) else alternating(when)
    mixed = many & own.any(axis=2)
    note += " Dark grey: several steps." * bool(mixed.any())
    return View(
        np.concatenate([own, rest], axis=2),
        mixed,
        [*tones, NEVER, OTHERS],
        [*names, "never", "other ranks"],
        holder,
        [*keys, (OTHERS, "pairs of other ranks")],
        f"rank {rank} computes in",
        (note,),
    )


def _view(what: Plan | Documents, grid: Grid, rank: int | None, step: int | None) -> View:
    """The view that was asked for."""
    if isinstance(what, Documents):
        if rank is not None or step is not None:
            raise ValueError("documents alone have no ranks and no steps; give a plan")
        return _alone(what, grid)
    few_enough(what.ranks)
    if rank is None:
        if step is not None:
            raise ValueError("a step is shown for one rank; give rank, too")
        return _by_rank(what.context_plan, grid)
    many = {"rank": (rank, what.layout.ranks), "step": (step or 0, what.schedule.num_steps() + 1)}
    for name, (value, count) in many.items():
        if not 0 <= value < count:
            raise ValueError(f"{name} {value} does not exist: {name}s are 0..{count - 1}")
    return _by_step(what.context_plan, grid, rank, step)


def mask(what: Plan | Documents, *, rank: int | None = None, step: int | None = None) -> Figure:
    """Draw the mask of a packed row, and who computes which part of it, when.

    Args:
        what: a plan, or documents alone.
        rank: show this rank's pairs, coloured by step; default: all ranks, coloured by rank.
        step: of that rank, the one to bring out.

    Raises:
        ValueError: no tokens, a rank or step the plan does not have, or more ranks than can be drawn.

    >>> from tasp_core import plan
    >>> mask(plan([40, 24], 4)).title
    '2 documents, 64 tokens, zigzag on 4 ranks: 27.3 % of the pairs are visible'
    """
    docs = what if isinstance(what, Documents) else what.docs
    if not docs.total:
        raise ValueError("a row of 0 tokens has no mask; give documents with tokens")
    grid, many = Grid.of(docs.total), len(docs.lengths)
    view = _view(what, grid, rank, step)
    title = f"{many} document{'s' * (many != 1)}, {docs.total:,} tokens"
    if isinstance(what, Plan):
        ranks = what.context_plan.ranks
        title += f", {what.layout.name} on {ranks} rank{'s' * (ranks != 1)}"
    part = docs.num_pairs / max(1, docs.total) ** 2
    title += f": {100 * part:.3g} % of the pairs are visible"
    facts = "; ".join(words for _, words in view.keys)
    desc = f"{title}, {docs.num_pairs:,} in all. Queries down, keys across. {facts}."
    codes = _codes(view.weight, view.mixed)
    marks = _axes(docs) + _cells(codes, [*view.tones, MIXED], [*view.tips, "several"])
    marks += _outlines(docs, grid) + _keys(view.head, view.keys)
    if view.holder is not None and isinstance(what, Plan):
        marks += _strips(view.holder, what.layout.ranks)
    high = max(TOP + STRIP + SIDE, max(m.points[0].imag for m in marks) + 24)
    drawn = Drawing(RIGHT + 330, high, marks)
    return Figure(title, view.notes, desc, drawn)
