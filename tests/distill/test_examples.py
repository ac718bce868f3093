"""The examples of distillation, as they are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.project.markdown import blocks, commands

ROOT = Path(__file__).resolve().parents[2]
TRL = ROOT / ".venv-trl" / "bin" / "python"


def shown_command(example: str) -> list[str]:
    """As the documentation has it."""
    (command,) = [
        command
        for block in blocks("sh")
        for command in commands(block)
        if command[:2] == ["python", example]
    ]
    return command


def numbers(python: Path | str, command: Sequence[str]) -> list[float]:
    """What the example says of each of its steps, when it is run by this Python."""
    ran = subprocess.run(
        [python, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return [float(one) for one in re.findall(r"^step \d+: \D*([\d.]+)", ran.stdout, re.MULTILINE)]


@pytest.mark.long
def test_a_plain_torch_loop_brings_the_student_nearer_and_halves_the_divergence():
    found = numbers(sys.executable, shown_command("examples/distill_torch.py"))
    assert len(found) == 14
    assert found[:3] == sorted(found[:3], reverse=True)
    assert found[-1] < found[0] / 2


@pytest.mark.long
@pytest.mark.skipif(not TRL.exists(), reason="no TRL: run `python scripts/peer_env.py trl`")
def test_trls_trainer_does_likewise():
    found = numbers(TRL, ["python", "examples/distill_trl.py", "--steps", "3"])
    assert len(found) == 3
    assert found == sorted(found, reverse=True)


def test_the_loop_itself_is_ten_lines():
    """From the batch to its gradient; the rest is any trainer's own."""
    text = (ROOT / "examples" / "distill_torch.py").read_text()
    loop = text[text.index("batch = await DeferredBatch.open") : text.index("optimizer.step()")]
    assert len(loop.strip().splitlines()) <= 10
