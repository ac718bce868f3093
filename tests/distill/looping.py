"""A training loop over toy roles, whose trainer's weights are a digest of all that it has seen; run
as a program it kills itself at a point that it is given.

python looping.py DIRECTORY STUDENT JUDGE TEACHER STEPS POINT
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from phalanx.client import AsyncRoleClient
from phalanx.distill import (
    Checkpoint,
    DiskStore,
    DistillLoop,
    EngineWeights,
    Grading,
    LoopParts,
    LoopPlan,
    NoPhases,
    Phases,
    Prompt,
    RolloutSettings,
    RolloutWorkload,
    Sample,
    SampleStore,
    Scoring,
    StudentScorer,
    TeacherRequest,
    TeacherScorer,
    TokenSelection,
)

PLAN = LoopPlan(
    scoring={Scoring.JUDGE: "genrm", Scoring.TEACHER: "teacher", Scoring.STUDENT: "student_score"},
    pause_s=0.01,
)
Point = Callable[[str], None]


def no_point(name: str) -> None:
    """Nothing happens there."""


class DigestTrainer:
    """`point` is told where it is; `log` holds what it trained on: (step, digest)."""

    def __init__(self, directory: Path, point: Point = no_point) -> None:
        self.directory = directory
        self.point = point
        self.log: list[tuple[int, str]] = []
        self.holds = False
        self._state = ""

    def last(self) -> Checkpoint | None:
        steps = [int(path.name) for path in self.directory.glob("[0-9]*")]
        return self._checkpoint(max(steps)) if steps else None

    def load(self) -> None:
        self.point("load")
        last = self.last()
        self._state = "" if last is None else Path(last.path, "weights").read_text()
        self.holds = True
        self.point("loaded")

    def train(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        assert self.holds
        for one in samples:
            assert one.scores is not None and one.reward is not None
            assert len(one.scores.teacher_log_probs) == one.response_length
            assert one.scores.student_at_teacher_topk is not None
        self.point("train")
        seen = hashlib.sha256(msgspec.msgpack.encode(tuple(samples))).hexdigest()[:16]
        self.log.append((step, seen))
        self._state = hashlib.sha256(f"{self._state} {seen}".encode()).hexdigest()[:16]
        self.point("trained")
        return {"loss": 1 / (step + 1), "num_samples": float(len(samples))}

    def save(self, step: int) -> Checkpoint:
        new = self.directory / f"new-{step}"
        new.mkdir(parents=True, exist_ok=True)
        (new / "weights").write_text(self._state)
        self.point("save")
        new.rename(self.directory / str(step))
        self.point("saved")
        return self._checkpoint(step)

    def offload(self) -> None:
        self.point("offload")
        self.holds = False

    def _checkpoint(self, step: int) -> Checkpoint:
        return Checkpoint(step, self.directory / str(step), f"v{step}")


def prompts(step: int) -> list[Prompt]:
    request = TeacherRequest(selection=TokenSelection.UNION, top_k=2)
    return [Prompt(f"g{at}", (3 + at, 1 + step), teacher=request) for at in range(2)]


async def train(
    urls: Sequence[str],
    trainer: DigestTrainer,
    store: SampleStore,
    num_steps: int,
    *,
    phases: Phases | None = None,
    on_event: Callable[[object], None] = lambda event: None,
    plan: LoopPlan = PLAN,
) -> Checkpoint | None:
    """Of the engines at `urls`: student, judge and teacher."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncRoleClient(url)) for url in urls]
        weights = await stack.enter_async_context(EngineWeights(urls[0]))
        student, judge, teacher = clients
        grading = Grading(
            messages=lambda one: [{"role": "user", "content": one.text}],
            reward=lambda said, one: float(said),
        )
        settings = RolloutSettings(num_samples=2, max_new_tokens=5, top_logprobs=2)
        parts = LoopParts(
            phases=phases or NoPhases(),
            store=store,
            workload=RolloutWorkload(student, settings, judge=judge, grading=grading),
            trainer=trainer,
            prompts=prompts,
            teacher=TeacherScorer(teacher),
            student=StudentScorer(student),
            weights=weights,
        )
        return await DistillLoop(parts, plan, on_event).run(num_steps)


def main(directory: str, student: str, judge: str, teacher: str, steps: str, at: str) -> None:
    """`at` is NAME:N, the n-th time that a point of that name is passed."""
    name, _, count = at.partition(":")
    left = int(count or 0)

    def point(passed: str) -> None:
        nonlocal left
        if passed == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_event(event: object) -> None:
        point(type(event).__name__)

    trainer = DigestTrainer(Path(directory, "checkpoints"), point)
    with DiskStore(Path(directory, "samples")) as store:
        last = asyncio.run(
            train([student, judge, teacher], trainer, store, int(steps), on_event=on_event)
        )
    assert last is not None and not trainer.holds
    print(json.dumps({"weights": Path(last.path, "weights").read_text(), "log": trainer.log}))


if __name__ == "__main__":
    main(*sys.argv[1:])
