"""Logging of the command line: readable lines or JSON lines, each with its request's id.

Importing this changes nothing; library code only ever uses `logging.getLogger(__name__)`.
"""

from __future__ import annotations

import json as json_format
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

ROOT = "phalanx"
_rid: ContextVar[str] = ContextVar("phalanx_log_rid", default="")


@contextmanager
def request_context(rid: str) -> Iterator[None]:
    """What is logged in this context carries this request id.

    A call that knows another one passes `extra={"rid": rid}`.
    """
    token = _rid.set(rid)
    try:
        yield
    finally:
        _rid.reset(token)


@dataclass(frozen=True)
class LogSetup:
    """How `configure` was called, for another process to do the same."""

    level: str
    json: bool
    file: Path | None


def configured() -> LogSetup | None:
    """What `configure` has set up in this process; None where it has not been called."""
    root = logging.getLogger(ROOT)
    for handler in root.handlers:
        formatter = handler.formatter
        if isinstance(formatter, LineFormatter | JsonFormatter):
            file = Path(handler.baseFilename) if isinstance(handler, logging.FileHandler) else None
            level = logging.getLevelName(root.level)
            return LogSetup(level, isinstance(formatter, JsonFormatter), file)
    return None


def configure(
    level: str = "INFO", *, json: bool = False, file: Path | None = None, worker: str = ""
) -> None:
    """Send this package's log to stderr, or to the end of `file`, from `level` on.

    `worker` names this process in each line, where several write to the same place. A later call
    replaces an earlier one. Loggers of other packages are left alone.
    """
    handler: logging.Handler
    if file is None:
        handler = _StderrHandler()
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
    handler.addFilter(_add_rid)
    handler.setFormatter(JsonFormatter(worker) if json else LineFormatter(worker))
    root = logging.getLogger(ROOT)
    for earlier in list(root.handlers):
        root.removeHandler(earlier)
        earlier.close()
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever is stderr at that time: a program may put something else there and close it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _add_rid(record: logging.LogRecord) -> bool:
    # Taken where the record is made, which is the thread or task of the request.
    record.__dict__.setdefault("rid", _rid.get())
    return True


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class LineFormatter(logging.Formatter):
    """`time level logger <worker> [rid] message`, then a traceback where there is one."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = f" <{worker}>" if worker else ""

    def format(self, record: logging.LogRecord) -> str:
        rid = record.__dict__.get("rid", "")
        request = f" [{rid}]" if rid else ""
        origin = f"{record.name}{self._worker}{request}"
        line = f"{_time(record)} {record.levelname:<7} {origin} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message; worker, rid and exception where given."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._worker:
            fields["worker"] = self._worker
        rid = record.__dict__.get("rid", "")
        if rid:
            fields["rid"] = rid
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json_format.dumps(fields, ensure_ascii=False)
