"""The worked example of docs/step-engine.md, run as its reader runs it."""

from __future__ import annotations

from pathlib import Path

from tests.forked import run_forked

ROOT = Path(__file__).parents[2]


def test_two_share_the_steps_while_the_third_waits_for_a_slot():
    ran = run_forked((ROOT / "examples" / "step_engine.py").read_text(encoding="utf-8"))
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    finals = [line for line in lines if line.startswith("Final")]
    assert finals == [
        "Final(rid='a', payload=(1, 3, 6), cancelled=False)",
        "Final(rid='b', payload=(10, 21, 33), cancelled=False)",
        "Final(rid='c', payload=(100, 201, 303), cancelled=False)",
    ]
    first_of_c = next(i for i, line in enumerate(lines) if "'c', payload" in line)
    assert lines.index(finals[0]) < first_of_c
