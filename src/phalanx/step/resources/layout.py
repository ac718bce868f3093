"""How a step's segments become the rows of its plans: one plan a label, in segment order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.step.declaration import Segment

Rows = Mapping[str, tuple[Segment, ...]]


def rows_by_label(
    segments: Sequence[Segment],
    combined: Mapping[str, tuple[str, ...]],
    always: Sequence[str] = (),
) -> Rows:
    """The segments of every label, and of every combined label those of its sources, label by
    label. Labels in `always` are there also without a segment.
    """
    by_label: dict[str, list[Segment]] = {label: [] for label in always}
    for segment in segments:
        by_label.setdefault(segment.label, []).append(segment)
    rows = {label: tuple(group) for label, group in by_label.items()}
    for name, sources in combined.items():
        rows[name] = tuple(row for source in sources for row in rows.get(source, ()))
    return rows
