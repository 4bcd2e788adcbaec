"""Marks as SVG, which browsers, GitHub and nbviewer show without scripts."""

from __future__ import annotations

from html import escape

from .colours import INK
from .marks import Drawing, Mark, head


def clean(words: str) -> str:
    """Text that is valid in XML: escaped, with ? for characters that cannot be printed."""
    return escape("".join(c if c.isprintable() else "?" for c in words))


def _n(value: float) -> str:
    """A coordinate, rounded to a tenth of a pixel, without a trailing .0."""
    return f"{value:.1f}".removesuffix(".0")


def _at(z: complex) -> str:
    return f"{_n(z.real)} {_n(z.imag)}"


def _look(m: Mark) -> str:
    """The attributes class, fill, stroke and stroke-dasharray."""
    kind = f' class="{m.name}"' if m.name else ""
    if m.stroke == "none":
        crisp = ' shape-rendering="crispEdges"' if m.shape == "rect" else ""  # no seams
        return f'{kind} fill="{m.fill}"{crisp}'
    dashes = f' stroke-dasharray="{m.dash}"' if m.dash else ""
    return f'{kind} fill="{m.fill}" stroke="{m.stroke}" stroke-width="{_n(m.width)}"{dashes}'


def _text(m: Mark) -> str:
    z, size = m.points[0], int(m.size)
    more = f' class="{m.name}"' if m.name else ""
    if m.halo:
        more += ' stroke="#FFFFFF" stroke-width="4" paint-order="stroke"'
    if m.turn:
        more += f' transform="rotate({m.turn} {_at(z)})"'
    if m.bold:
        more += ' font-weight="700"'
    if m.fill != INK:
        more += f' fill="{m.fill}"'
    if m.anchor != "middle":
        more += f' text-anchor="{m.anchor}"'
    return (
        f'<text{more} x="{_n(z.real)}" y="{_n(z.imag + 0.35 * size)}" font-size="{size}">'
        f"{clean(m.words)}</text>"
    )


def element(m: Mark) -> str:
    """One mark as an SVG element."""
    if m.shape == "text":
        return _text(m)
    tip = f"<title>{clean(m.tip)}</title>" if m.tip else ""
    a, b = m.points[0], m.points[-1]
    if m.shape == "arrow":
        point, p, q = head(m)
        return (
            f'<g class="{m.name}">{tip}<path d="M{_at(a)}Q{_at(m.points[1])} {_at((p + q) / 2)}" '
            f'fill="none" stroke="{m.stroke}" stroke-width="{_n(m.width)}"/>'
            f'<path d="M{_at(point)}L{_at(p)} {_at(q)}Z" fill="{m.stroke}"/></g>'
        )
    if m.shape == "rect":
        tag, size = "rect", b - a
        where = (
            f'x="{_n(a.real)}" y="{_n(a.imag)}" width="{_n(size.real)}" height="{_n(size.imag)}"'
        )
    elif m.shape == "disc":
        tag, where = "circle", f'cx="{_n(a.real)}" cy="{_n(a.imag)}" r="{_n(m.size)}"'
    else:
        tag, closed = "path", "Z" * (m.shape == "shape")
        where = f'd="M{_at(a)}L{" ".join(map(_at, m.points[1:]))}{closed}"'
    return f"<{tag} {where}{_look(m)}" + (f">{tip}</{tag}>" if tip else "/>")


def document(drawing: Drawing, title: str, desc: str) -> str:
    """An SVG file with its title and text alternative."""
    width, height = f"{drawing.width:.0f}", f"{drawing.height:.0f}"
    body = "\n".join(map(element, sorted(drawing.marks, key=lambda m: m.layer)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" fill="{INK}" text-anchor="middle" '
        f'style="max-width:100%;height:auto">\n<title>{clean(title)}</title>\n'
        f"<desc>{clean(desc)}</desc>\n"
        f'<rect width="100%" height="100%" fill="#FFFFFF"/>\n{body}\n</svg>\n'
    )
