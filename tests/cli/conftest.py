"""The command line, run in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from phalanx.cli.main import main


@pytest.fixture
def own_log() -> Iterator[None]:
    """Where this process logs is as it was, when a command that has set it up has ended."""
    root = logging.getLogger("phalanx")
    handlers, level, propagate = list(root.handlers), root.level, root.propagate
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    root.propagate = propagate


@pytest.fixture
def run(capsys, monkeypatch, own_log):
    """Runs the command line in this process; gives its exit code, stdout and stderr."""
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        code = ended.value.code
        return (0 if code is None else int(code)), out, err

    return call
