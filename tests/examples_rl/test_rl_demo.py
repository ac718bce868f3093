"""`examples/rl_demo.py` with tiny models, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rl_demo
from rl.comparing import records

from tests.caches import own_cache

DEMO = Path(__file__).parents[2] / "examples" / "rl_demo.py"
SHORT = ("--tiny", "--samples", "1", "--tokens", "4")


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PHALANX_CACHE_DIR": str(own_cache(folder / "cache")),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DEMO, *SHORT, "--out", folder / "out", *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Where a demo was ended by Ctrl-C in the middle of its first placement, and how that went."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, DEMO, *SHORT, "--out", folder / "out", "--steps", "100"]
    with subprocess.Popen(
        command, env=environment(folder), stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if "step 1: loss " in line:
                break
        process.send_signal(signal.SIGINT)
        told = process.stdout.read()
    return folder, process.returncode, told


@pytest.mark.long
def test_ctrl_c_leaves_nothing_behind(interrupted):
    folder, status, told = interrupted
    assert status == 130
    assert "Stopped; what there is of it lies in" in told
    mark = f"PHALANX_CACHE_DIR={folder / 'cache'}".encode()
    left = [
        each for each in Path("/proc").iterdir() if each.name.isdecimal() and marked(each, mark)
    ]
    assert left == []


@pytest.mark.long
def test_both_placements_give_the_same(interrupted):
    """Also where one of them was interrupted, and goes on."""
    folder, _, _ = interrupted
    done = demo(folder, "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "split is there already: going on with it" in done.stdout
    assert "defer is there already" not in done.stdout
    assert re.search(r"Exactly the same in both: 8 answers .* 32\s+log-probabilities", done.stdout)
    assert "split against defer" in done.stdout
    assert "step 2: loss " in done.stdout
    for placement in ("split", "defer"):
        steps = records(folder / "out" / placement)
        assert [one.step for one in steps] == [0, 1]
        for record in steps:
            assert all(one.scores is not None and one.reward is not None for one in record.samples)
    picture = (folder / "out" / "timeline.svg").read_text()
    assert "defer: 1 x 8 MiB" in picture
    assert "trainer: " in picture
    for phase in ("rollout", "genrm", "teacher", "train"):
        assert f"{phase}, step-0" in picture


def marked(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or is somebody else's


def test_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit) as ended:
        rl_demo.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(flag in told for flag in ("--placement", "--steps", "--out", "--tiny"))


@pytest.mark.parametrize("key", ["roles", "gateway"])
def test_both_files_differ_in_the_placement_alone(key):
    import yaml

    split, defer = (
        yaml.safe_load((DEMO.parent / "rl" / f"{name}.yaml").read_text())
        for name in ("split", "defer")
    )
    assert split[key] == defer[key]
    assert {**split["placement"], "mode": "defer", "devices_per_node": 1} == defer["placement"]
