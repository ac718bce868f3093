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
from datetime import UTC, datetime
from pathlib import Path

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


def configure(level: str = "INFO", *, json: bool = False, file: Path | None = None) -> None:
    """Send this package's log to stderr, or to `file`, from `level` on.

    A later call replaces an earlier one. Loggers of other packages are left alone.
    """
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
    handler.addFilter(_add_rid)
    handler.setFormatter(JsonFormatter() if json else LineFormatter())
    root = logging.getLogger(ROOT)
    for earlier in list(root.handlers):
        root.removeHandler(earlier)
        earlier.close()
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False


def _add_rid(record: logging.LogRecord) -> bool:
    # Taken where the record is made, which is the thread or task of the request.
    record.__dict__.setdefault("rid", _rid.get())
    return True


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class LineFormatter(logging.Formatter):
    """`time level logger [rid] message`, then a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        rid = record.__dict__.get("rid", "")
        request = f" [{rid}]" if rid else ""
        line = f"{_time(record)} {record.levelname:<7} {record.name}{request} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and rid and exception where given."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        rid = record.__dict__.get("rid", "")
        if rid:
            fields["rid"] = rid
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json_format.dumps(fields, ensure_ascii=False)
