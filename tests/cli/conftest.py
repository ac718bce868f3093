"""The command line, run in this process."""

from __future__ import annotations

import pytest

from phalanx.cli.main import main


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command line in this process; gives its exit code, stdout and stderr."""
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        code = ended.value.code
        return (0 if code is None else int(code)), out, err

    return call
