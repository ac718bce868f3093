"""A picture of a plan as SVG, with a legend; readable on white and without any font of its own."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from phalanx.roles.placement.picture import Cell, Picture, Row

_LINE = 26
_TOP = 82
_MARGIN = 16
_CHARACTER = 7.2
"""How wide one is at most, of the sizes of text used here."""
_FREE = "#f2f2f2"
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1a1a1a}"
    ".title{font-weight:600;font-size:15px}.head{font-weight:600}.note{fill:#595959}"
)


def svg(picture: Picture, title: str) -> str:
    """The whole file. A role that only keeps its bundle in a phase is paler there."""
    left = _MARGIN + _wide([row.label for row in picture.rows])
    labels = [cell.label for row in picture.rows for cell in row.cells if cell is not None]
    column = _wide([*labels, *picture.phases])
    legend = [user for user in picture.colours if any(_has(row, user) for row in picture.rows)]
    width = max(
        left + column * len(picture.phases),
        _MARGIN + sum(_wide([user]) + 20 for user in legend),
        _MARGIN + _wide([title]) * 1.2,
    )
    notes = []
    if picture.num_hidden:
        notes.append(f"and {picture.num_hidden:,} more devices")
    if any(cell is not None and not cell.active for row in picture.rows for cell in row.cells):
        notes.append("paler: resident, while the phase is another's")
    width = max(width, _MARGIN + _wide(notes))
    height = _TOP + _LINE * (len(picture.rows) + len(notes)) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + _MARGIN:.0f}"'
        f' height="{height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(_MARGIN, 24, title, "title"),
        *_legend(picture, legend),
        *(
            _text(left + column * (at + 0.5), _TOP - 8, name, "head", "middle")
            for at, name in enumerate(picture.phases)
        ),
    ]
    for at, row in enumerate(picture.rows):
        parts += _row(picture, row, left, _TOP + _LINE * at, column)
    for at, words in enumerate(notes, len(picture.rows)):
        parts.append(_text(_MARGIN, _TOP + _LINE * (at + 0.7), words, "note"))
    return "\n".join([*parts, "</svg>", ""])


def _legend(picture: Picture, users: list[str]) -> Iterator[str]:
    x = float(_MARGIN)
    for user in users:
        yield f'<rect x="{x:.1f}" y="36" width="12" height="12" fill="{picture.colours[user]}"/>'
        yield _text(x + 17, 46, user)
        x += _wide([user]) + 20


def _row(picture: Picture, row: Row, left: float, y: float, column: float) -> Iterator[str]:
    yield _text(_MARGIN, y + 17, row.label)
    for at, cell in enumerate(row.cells):
        yield from _cell(picture, cell, left + column * at, y, column)


def _cell(picture: Picture, cell: Cell | None, x: float, y: float, width: float) -> Iterator[str]:
    colour = _FREE if cell is None else picture.colours[cell.user]
    opacity = 0.35 if cell is not None and not cell.active else 1
    yield (
        f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{_LINE - 2}"'
        f' rx="3" fill="{colour}" fill-opacity="{opacity}"/>'
    )
    if cell is not None:
        ink = "#ffffff" if cell.active and is_dark(colour) else "#1a1a1a"
        yield _text(x + width / 2, y + 17, cell.label, anchor="middle", fill=ink)


def is_dark(colour: str) -> bool:
    """Whether white is easier to read on it than black."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 120


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "", fill: str = "") -> str:
    extra = f' class="{kind}"' if kind else ""
    extra += f' text-anchor="{anchor}"' if anchor else ""
    extra += f' style="fill:{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(words)}</text>'


def _wide(words: list[str]) -> float:
    return max((len(each) for each in words), default=0) * _CHARACTER + 24


def _has(row: Row, user: str) -> bool:
    return any(cell is not None and cell.user == user for cell in row.cells)
