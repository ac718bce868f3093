"""Draws timelines as SVG: the phases above, and below them each device with who holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rl.timeline import Change, Timeline

COLORS = {
    "rollout": "#4c78a8",
    "genrm": "#f58518",
    "teacher": "#54a24b",
    "trainer": "#b279a2",
    "train": "#b279a2",
}
_OTHER = "#888888"
_MIB = 1 << 20
_LEFT, _WIDTH, _RIGHT = 150, 760, 20
_LANE, _GAP, _STRIP, _TITLE = 64, 10, 18, 34


def draw(timelines: Mapping[str, Timeline], file: Path) -> Path:
    """All of them one below the other, on the same scale of time."""
    end_s = max(timeline.end_s for timeline in timelines.values())
    parts: list[str] = []
    top = 8.0
    for name, timeline in timelines.items():
        panel = _Panel(timeline, top, _WIDTH / max(end_s, 1e-9))
        parts += panel.draw(name)
        top = panel.bottom + 14
    parts += _axis(top, end_s)
    top += 34
    parts += _legend(top)
    width, height = _LEFT + _WIDTH + _RIGHT, top + 18
    file.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(parts)
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n',
        encoding="utf-8",
    )
    return file


@dataclass(frozen=True)
class _Panel:
    """One timeline from `top` on."""

    timeline: Timeline
    top: float
    per_second: float

    @property
    def bottom(self) -> float:
        return self._lane(self.timeline.num_devices)

    def draw(self, name: str) -> Iterator[str]:
        timeline = self.timeline
        budget = timeline.budget_bytes / _MIB
        words = f"{name}: {timeline.num_devices} x {budget:.0f} MiB, {timeline.end_s:.0f} s"
        yield _text(_LEFT, self.top + 14, words, bold=True)
        strip = self.top + _TITLE - 12
        yield _text(_LEFT - 8, strip + 13, "phase", end=True)
        for span in timeline.spans:
            at, width = self._x(span.start_s), (span.end_s - span.start_s) * self.per_second
            yield _box(at, strip, width, _STRIP, _color(span.phase), f"{span.phase}, {span.batch}")
        for device in range(timeline.num_devices):
            yield from self._device(device)

    def _device(self, device: int) -> Iterator[str]:
        timeline = self.timeline
        top = self._lane(device)
        peak = timeline.peaks[device] / _MIB if device < len(timeline.peaks) else 0
        yield f'<rect x="{_LEFT}" y="{top:.1f}" width="{_WIDTH}" height="{_LANE}" fill="#f4f4f4"/>'
        yield _text(_LEFT - 8, top + 26, f"device {device}", end=True)
        yield _text(_LEFT - 8, top + 41, f"peak {peak:.0f} MiB", end=True)
        changes = [one for one in timeline.changes if one.device == device]
        last = Change(timeline.end_s, device, {})
        for before, after in zip(changes, [*changes[1:], last], strict=True):
            base = top + _LANE
            width = (after.at_s - before.at_s) * self.per_second
            for role, num_bytes in sorted(before.held.items()):
                height = _LANE * num_bytes / timeline.budget_bytes
                base -= height
                title = f"{role}: {num_bytes / _MIB:.0f} MiB"
                yield _box(self._x(before.at_s), base, width, height, _color(role), title)
        line = f'x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{top:.1f}" y2="{top:.1f}"'
        yield f'<line {line} stroke="#cc0000" stroke-dasharray="4 3"/>'

    def _lane(self, device: int) -> float:
        return self.top + _TITLE + _STRIP + device * (_LANE + _GAP)

    def _x(self, seconds: float) -> float:
        return _LEFT + seconds * self.per_second


def _axis(top: float, end_s: float) -> Iterator[str]:
    step = next((each for each in (1, 2, 5, 10, 20, 50, 100, 200) if end_s / each <= 12), 500)
    for number in range(int(end_s / step) + 1):
        x = _LEFT + number * step * _WIDTH / max(end_s, 1e-9)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{top + 4:.1f}" stroke="#666"/>'
        yield _text(x, top + 17, f"{number * step} s", middle=True)


def _legend(top: float) -> Iterator[str]:
    x = float(_LEFT)
    for role in ("rollout", "genrm", "teacher", "trainer"):
        yield _box(x, top - 10, 12, 12, COLORS[role], role)
        yield _text(x + 17, top, role)
        x += 90
    yield f'<line x1="{x}" x2="{x + 24}" y1="{top - 4}" y2="{top - 4}" stroke="#cc0000"'
    yield ' stroke-dasharray="4 3"/>'
    yield _text(x + 30, top, "a device's budget")


def _color(role: str) -> str:
    return COLORS.get(role, _OTHER)


def _box(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    size = f'width="{max(width, 0.5):.1f}" height="{height:.1f}"'
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{color}"><title>{escape(title)}</title></rect>'
    )


def _text(
    x: float, y: float, words: str, *, end: bool = False, middle: bool = False, bold: bool = False
) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchor}{weight}>{escape(words)}</text>'
