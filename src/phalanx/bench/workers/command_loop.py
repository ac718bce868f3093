"""The loop of every benchmarked system's process: one JSON object a line, each answered in turn.

This folder's files are run by path in the environment of the system that they measure, which need
not have Phalanx installed: they import the standard library, each other, and that system (numpy,
where arrays are sent).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

Message = dict[str, Any]


class Loaded(Protocol):
    """What `start` made."""

    def describe(self) -> str:
        """Version and what matters of how it runs."""
        ...

    def close(self) -> None: ...


L = TypeVar("L", bound=Loaded)


def answer_commands(
    load: Callable[[Message], L], commands: Mapping[str, Callable[[L, Message], Message]]
) -> None:
    """Answer commands from standard input until it ends; `start` loads, and comes first.

    What raises is answered with `failed`. Whatever the system prints goes to standard error, so
    that standard output holds answers only.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loaded: L | None = None
    for line in sys.stdin:
        message = json.loads(line)
        kind = message.pop("kind")
        try:
            if kind == "start":
                loaded = load(message)
                answer = {"kind": "ready", "description": loaded.describe()}
            elif loaded is None:
                raise RuntimeError(f"{kind!r} came before 'start'")
            else:
                answer = {"kind": "done", **commands[kind](loaded, message)}
        except Exception as error:  # noqa: BLE001 - the boundary to a foreign system
            traceback.print_exc()
            answer = {"kind": "failed", "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if loaded is not None:
        loaded.close()
