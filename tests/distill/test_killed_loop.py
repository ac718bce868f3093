"""A training loop's process that ends anywhere: the next one ends with the same weights."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from phalanx.distill import Checkpoint, DiskStore, MemoryStore
from tests.distill.loop_case import engines, urls
from tests.distill.looping import DigestTrainer, train

NUM_STEPS = 3


def weights_of(checkpoint: Checkpoint | None) -> str:
    return Path(checkpoint.path, "weights").read_text()


async def undisturbed(tmp_path: Path, num_steps: int = NUM_STEPS) -> str:
    async with engines() as toys:
        trainer = DigestTrainer(tmp_path / "undisturbed")
        last = await train(urls(toys), trainer, MemoryStore(), num_steps)
        return weights_of(last)


def test_a_run_is_the_same_again_and_goes_on_where_it_stopped(tmp_path):
    async def run():
        expected = await undisturbed(tmp_path)
        assert await undisturbed(tmp_path / "again") == expected
        async with engines() as toys:
            for num_steps in (1, 1, 3, 0, 2):
                trainer = DigestTrainer(tmp_path / "parts")
                with DiskStore(tmp_path / "samples") as store:
                    last = await train(urls(toys), trainer, store, num_steps)
            assert weights_of(last) == expected

    asyncio.run(run())


POINTS = [
    "PhaseEntered:1",
    "SamplesDone:2",
    "SamplesDone:8",
    "SamplesDone:11",
    "PhaseEntered:5",
    "load:2",
    "train:2",
    "save:2",
    "saved:1",
    "offload:2",
    "StepTrained:1",
    "WeightsPushed:2",
    "StepEnded:1",
]
AFTER_SCORING = POINTS[POINTS.index("PhaseEntered:5") :]
QUICK = ["saved:1"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> str:
    return asyncio.run(undisturbed(tmp_path_factory.mktemp("whole"), 2))


@pytest.mark.parametrize("point", QUICK)
def test_killed_the_next_process_ends_with_the_same_weights(tmp_path, expected, point):
    check_killed(tmp_path, expected, point)


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere(tmp_path, expected, point):
    check_killed(tmp_path, expected, point)


def check_killed(tmp_path: Path, expected: str, point: str) -> None:
    async def run():
        async with engines() as toys:
            command = [sys.executable, "-m", "tests.distill.looping", str(tmp_path / "killed")]

            async def program(at: str) -> tuple[int, str]:
                process = await asyncio.create_subprocess_exec(
                    *command, *urls(toys), "2", at, stdout=asyncio.subprocess.PIPE
                )
                out, _ = await process.communicate()
                return process.returncode, out.decode()

            assert (await program(point))[0] == -signal.SIGKILL
            num_before = [len(toy.asked) for toy in toys]
            status, out = await program("never:1")
            assert status == 0
            assert json.loads(out)["weights"] == expected
            for toy, before in zip(toys[1:], num_before[1:], strict=True):
                # Only what was on its way, of one step's four samples, may be asked for again.
                lost = 0 if point in AFTER_SCORING else 4
                assert len(toy.asked) <= 8 + lost
                assert before <= 8
            trained = json.loads(out)["log"]
            assert [step for step, _ in trained] == sorted(step for step, _ in trained)

    asyncio.run(run())
