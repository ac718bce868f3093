"""What callers were told of their operations: an id has one meaning and one outcome."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import msgspec

Told = tuple[str, object, bool]
"""Path, what was asked, and whether it was done."""


class ToldOperations:
    """`wrong` is told of whatever must not be. `may_change`: whether an outcome may have been lost,
    since it could not be written down.
    """

    def __init__(self, wrong: Callable[[str], None], may_change: Callable[[], bool]) -> None:
        self._wrong = wrong
        self._may_change = may_change
        self._told: dict[str, Told] = {}

    def answered(self, asked: httpx.Request, answer: httpx.Response) -> None:
        if not asked.url.path.startswith("/v1/phases/"):
            return
        fields = msgspec.json.decode(asked.content, type=dict[str, object])
        operation_id = str(fields.pop("operation_id"))
        if answer.status_code != 200 and _code(answer) != "failed":
            return  # nothing was begun
        told = (asked.url.path, fields, answer.status_code == 200)
        before = self._told.setdefault(operation_id, told)
        if before[:2] != told[:2]:
            self._wrong(f"operation {operation_id} meant {before[:2]} and then {told[:2]}")
        elif before[2] != told[2] and not self._may_change():
            self._wrong(f"operation {operation_id} ended as {before} and as {told}")


def _code(answer: httpx.Response) -> str:
    found = msgspec.json.decode(answer.content, type=dict[str, dict[str, str]])
    return found["error"]["code"]
