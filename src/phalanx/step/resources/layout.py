"""How a step's segments become the rows of its plans: one plan a label, in segment order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.step.declaration import DEFAULT_LABEL, Segment

Rows = Mapping[str, tuple[Segment, ...]]


def rows_by_label(
    segments: Sequence[Segment], combined: Mapping[str, tuple[str, ...]], *, always: bool = False
) -> Rows:
    """The segments of every label, and of every combined label those of its sources, label by
    label.

    `always` is for captured shapes, which are there whoever takes part: the default label and the
    sources of combined ones are listed also without a segment.
    """
    by_label: dict[str, list[Segment]] = {}
    if always:
        names = [DEFAULT_LABEL, *(source for sources in combined.values() for source in sources)]
        by_label = {name: [] for name in names}
    for segment in segments:
        by_label.setdefault(segment.label, []).append(segment)
    rows = {label: tuple(group) for label, group in by_label.items()}
    for name, sources in combined.items():
        rows[name] = tuple(row for source in sources for row in rows.get(source, ()))
    return rows
