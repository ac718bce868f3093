"""The trainer's process: it goes through the phases of each step, learns, and pushes its weights.

Run in `examples/` as `python -m rl.trainer --help`. Started again with the same folder after it was
killed, it goes on with the step that it was in. What it does is told on stdout, a JSON object a line.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from phalanx.client import AsyncPhaseClient, AsyncRoleClient
from phalanx.distill import (
    AskingSettings,
    Checkpoint,
    DiskStore,
    DistillLoop,
    Grading,
    LoopEvent,
    LoopParts,
    LoopPlan,
    RoleWeights,
    RolloutSettings,
    RolloutWorkload,
    Sample,
    ScorerSettings,
    Scoring,
    TeacherScorer,
)
from phalanx.settings import end_without_collecting
from rl.grading import QUESTIONS, TOP_K, judges_messages, prompts, reward
from rl.learner import Learner, LearnerSettings, own_devices

STUDENT = "student"
ATTEMPTS = 8
"""At a phase: a gateway that is started anew takes a while."""
ASKING = AskingSettings(ready_timeout_s=5.0)
"""Roles are ready in their phases; where one is not for so long, its phase is entered again."""


class Recorded:
    """A trainer that keeps what it was trained on, to be compared with another run."""

    def __init__(self, trainer: Learner, folder: Path) -> None:
        self._trainer = trainer
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def last(self) -> Checkpoint:
        return self._trainer.last()

    def load(self) -> None:
        self._trainer.load()

    def train(self, samples: Sequence[Sample], step: int) -> Mapping[str, float]:
        metrics = self._trainer.train(samples, step)
        record = {"step": step, "metrics": metrics, "samples": list(samples)}
        new = self._folder / ".new"
        new.write_bytes(msgspec.json.encode(record))
        new.rename(self._folder / f"step-{step:04d}.json")
        return metrics

    def save(self, step: int) -> Checkpoint:
        return self._trainer.save(step)

    def offload(self) -> None:
        self._trainer.offload()


def tell(event: LoopEvent) -> None:
    print(json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)}), flush=True)


def tell_and_wait(event: LoopEvent) -> None:
    """Nothing goes on before whoever reads it answers with a line."""
    tell(event)
    if not sys.stdin.readline():
        raise SystemExit("whoever paced this has ended")


async def run(given: argparse.Namespace) -> None:
    settings = LearnerSettings(learning_rate=given.learning_rate)
    learner = Learner(given.student, given.out / "checkpoints", settings, own_devices())
    asked = prompts(str(given.student))[: given.questions]
    async with AsyncExitStack() as stack:
        store = stack.enter_context(DiskStore(given.out / "batches"))
        phases = await stack.enter_async_context(AsyncPhaseClient(given.control))
        weights = await stack.enter_async_context(RoleWeights(given.control, STUDENT))
        rollout, judge, teacher = [
            await stack.enter_async_context(AsyncRoleClient(f"{given.gateway}/{role}"))
            for role in ("rollout", "genrm", "teacher")
        ]
        parts = LoopParts(
            phases=phases,
            store=store,
            workload=_workload(given, rollout, judge),
            trainer=Recorded(learner, given.out / "records"),
            prompts=lambda step: asked,
            teacher=TeacherScorer(teacher, ScorerSettings(asking=ASKING)),
            weights=weights,
        )
        scoring = {Scoring.JUDGE: "genrm", Scoring.TEACHER: "teacher"}
        on_event = tell_and_wait if given.paced else tell
        plan = LoopPlan(scoring=scoring, attempts=ATTEMPTS)
        await DistillLoop(parts, plan, on_event).run(given.steps)


def _workload(
    given: argparse.Namespace, rollout: AsyncRoleClient, judge: AsyncRoleClient
) -> RolloutWorkload:
    settings = RolloutSettings(
        num_samples=given.samples,
        max_new_tokens=given.tokens,
        seed=given.seed,
        sampling={"temperature": 1.0},
        top_logprobs=TOP_K,
        asking=ASKING,
    )
    sampling = {"temperature": 0, "max_new_tokens": 8, "sampling_seed": given.seed}
    grading = Grading(judges_messages, reward, sampling=sampling, asking=ASKING)
    return RolloutWorkload(rollout, settings, judge=judge, grading=grading)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rl.trainer", description=__doc__)
    parser.add_argument("--control", required=True, help="the job's control_url")
    parser.add_argument("--gateway", required=True, help="the job's gateway_url")
    parser.add_argument("--student", required=True, type=Path, help="its first checkpoint")
    parser.add_argument("--out", required=True, type=Path, help="checkpoints, batches, records")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="the first of them")
    parser.add_argument("--samples", type=int, default=4, help="answers to each question")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=LearnerSettings.learning_rate)
    parser.add_argument(
        "--paced", action="store_true", help="wait for a line on stdin after each event"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    end_without_collecting()
    asyncio.run(run(parsed(arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
