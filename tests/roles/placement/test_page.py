"""`docs/placement.md` shows what `phalanx plan` prints, and the examples are what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.roles.config import parse_job
from tests.roles.placement.requests import DECOUPLED, DEFER, SPLIT

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples" / "placement").glob("*.yaml"))
SHOWN = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
DEFERRED = "examples/placement/defer.yaml"


def printed(capsys, monkeypatch, *arguments: str) -> tuple[str, str]:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    return "\n".join(line.rstrip() for line in out.splitlines()) + "\n", err


def test_the_page_shows_what_the_command_prints(capsys, monkeypatch):
    out, err = printed(capsys, monkeypatch, DEFERRED)
    assert (out, err) == (SHOWN[0], "")


def test_the_page_shows_how_a_job_is_refused(capsys, monkeypatch):
    _, err = printed(capsys, monkeypatch, DEFERRED, "--set", "placement.mode=split")
    assert err == SHOWN[1]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_planned(path):
    made = parse_job(path.read_text(encoding="utf-8"), str(path)).plan
    assert made is not None
    modes = {"split": SPLIT, "defer": DEFER, "decoupled": DECOUPLED, "large": DEFER}
    assert made.mode is modes[path.stem]
    assert made.replicas and made.groups
    assert f"examples/placement/{path.name}" in PAGE or path.stem in ("split", "decoupled")
