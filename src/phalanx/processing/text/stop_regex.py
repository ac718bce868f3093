"""Stop expressions: regular expressions in RE2's syntax, whose matching takes linear time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from phalanx.errors import InvalidRequestError, MissingDependencyError

PROGRAM_BYTES = 1 << 18
"""Memory of one compiled expression: what bounds how long it may take to compile."""


class Match(Protocol):
    def start(self) -> int: ...

    def end(self) -> int: ...


class StopPattern(Protocol):
    """A compiled expression."""

    @property
    def pattern(self) -> str: ...

    def search(self, text: str, pos: int = 0) -> Match | None: ...


def compile_stop_regex(expressions: Sequence[str]) -> tuple[StopPattern, ...]:
    """Compile `expressions`.

    Raises `InvalidRequestError` for one that is malformed, uses what RE2 lacks (look-around,
    back-references), is too large, or matches the empty text.
    """
    if not expressions:
        return ()
    try:
        import re2
    except ImportError as error:
        raise MissingDependencyError(
            "stop_regex needs google-re2; install it with `pip install phalanx[llm]`"
        ) from error
    compile_pattern: Callable[[str, object], StopPattern] = re2.compile
    options = re2.Options()
    options.log_errors = False
    options.max_mem = PROGRAM_BYTES
    patterns: list[StopPattern] = []
    for expression in expressions:
        try:
            pattern = compile_pattern(expression, options)
        except re2.error as error:
            raise InvalidRequestError(
                f"stop_regex {expression!r} cannot be used: {_reason(error)}; allowed is RE2 "
                "syntax, which has no look-around and no back-references",
                field="stop_regex",
            ) from error
        if pattern.search("") is not None:
            raise InvalidRequestError(
                f"stop_regex {expression!r} matches the empty text and would end every output at "
                "once; require at least one character",
                field="stop_regex",
            )
        patterns.append(pattern)
    return tuple(patterns)


def _reason(error: Exception) -> str:
    detail = error.args[0] if error.args else ""
    return detail.decode("utf-8", "replace") if isinstance(detail, bytes) else str(detail)
