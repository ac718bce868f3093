"""One call of a caller, in its exact shape, and what the caller reads of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

Check = type | Callable[[object], bool] | object


@dataclass(frozen=True)
class Call:
    """`reads`: by a dotted path into the answer, what must be there: a type, a predicate, a value.

    In the body `"{name}"` stands for what the test knows by that name.
    """

    path: str
    body: object = None
    method: str = "POST"
    status: int = 200
    reads: Mapping[str, Check] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def made(self, client: httpx.Client, known: Mapping[str, object]) -> None:
        """Send it; fail where the answer is not what the caller needs."""
        response = client.request(
            self.method, self.path, json=_filled(self.body, known), headers=dict(self.headers)
        )
        assert response.status_code == self.status, f"{self.path}: {response.text}"
        answer = response.json() if self.reads else None
        for path, check in self.reads.items():
            value = _at(answer, path)
            assert _passes(value, check), f"{self.path}: {path} is {value!r}"


def get(path: str, **fields: object) -> Call:
    return Call(path, method="GET", **fields)


def length(count: int) -> Callable[[object], bool]:
    """A list of so many."""

    def check(value: object) -> bool:
        return isinstance(value, Sequence) and len(value) == count

    return check


def _filled(body: object, known: Mapping[str, object]) -> object:
    match body:
        case str() if body.startswith("{") and body.endswith("}"):
            return known[body[1:-1]]
        case dict():
            return {key: _filled(value, known) for key, value in body.items()}
        case list():
            return [_filled(value, known) for value in body]
    return body


def _at(value: object, path: str) -> object:
    for step in path.split(".") if path else ():
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


def _passes(value: object, check: Check) -> bool:
    if isinstance(check, type):
        return isinstance(value, check)
    return bool(check(value)) if callable(check) else value == check
