"""A small post-training loop, twice: every role on a device of its own, and all on one by turns.

`make demo-rl` distils SmolLM2-135M into its own lower layers: the student answers, a judge grades,
the teacher scores, a trainer learns, and the new weights go back to the student. The devices are
simulated and have a budget of bytes. At the end stand the loss of each step, what each placement
took, whether both gave exactly the same, and a picture of who was where when.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rl.comparing import differences, final_digest, records
from rl.job import JobOptions, StartError, running, start_trainer
from rl.models import Models, smollm_models, tiny_models
from rl.picture import draw
from rl.tables import loss_table, placement_markdown, placement_table
from rl.timeline import Timeline, Watcher

from phalanx.client import PhaseClient
from phalanx.errors import MissingDependencyError

HERE = Path(__file__).resolve().parent
PLACEMENTS = ("split", "defer")
TINY_MIB = 8
INTERRUPTED = 130


@dataclass
class Outcome:
    """What came of one placement."""

    placement: str
    folder: Path
    timeline: Timeline
    step_s: list[float] = field(default_factory=list)


class Interrupted(Exception):
    """Somebody wants this to end."""


def main(arguments: list[str]) -> int:
    """Run the placements, compare them, and show it; the exit status."""
    given = parsed(arguments)
    console = Console()
    folder = given.out or Path(tempfile.mkdtemp(prefix="phalanx-rl-"))
    folder.mkdir(parents=True, exist_ok=True)
    placements = PLACEMENTS if given.placement == "both" else (given.placement,)
    try:
        with stopped_by_signals():
            models = tiny_models(folder / "models") if given.tiny else smollm_models()
            outcomes = [run(each, models, given, folder, console) for each in placements]
    except Interrupted:
        console.print(f"Stopped; what there is of it lies in {folder}")
        return INTERRUPTED
    except StartError as error:
        console.print(str(error), markup=False)
        return 1
    return report(outcomes, folder, console)


def run(
    placement: str, models: Models, given: argparse.Namespace, folder: Path, console: Console
) -> Outcome:
    """The whole loop in one placement."""
    out = folder / placement
    is_new = not out.exists()
    if not is_new:
        console.print(f"{out} is there already: going on with it")
    out.mkdir(exist_ok=True)
    options = JobOptions(
        HERE / "rl" / f"{placement}.yaml", f"rl-{placement}", models, assigned(given)
    )
    console.print(f"\n$ phalanx {' '.join(options.arguments[:4])}", highlight=False)
    with ExitStack() as stack:
        screen = stack.enter_context(progress(console))
        starting = screen.add_task(f"{placement}: starting the roles", total=None)
        job = stack.enter_context(running(options))
        screen.remove_task(starting)
        if is_new:
            # A job of this name may have been in the middle of a batch when it was ended.
            with PhaseClient(job.control_url) as phases:
                phases.leave(abandon=True)
        watcher = Watcher(job.control_url, job.ledger)
        arguments = trainer_arguments(job.control_url, job.gateway_url, models, given, out)
        timeline = stack.enter_context(watcher)
        trainer = stack.enter_context(
            ended(start_trainer(arguments, out / "trainer.log", job.trainer_environment))
        )
        outcome = Outcome(placement, out, timeline)
        follow(trainer, screen, outcome, given.steps)
        if trainer.wait() != 0:
            raise StartError(f"the trainer ended with {trainer.wait()}; see {out / 'trainer.log'}")
    return outcome


def follow(
    trainer: subprocess.Popen[str], screen: Progress, outcome: Outcome, num_steps: int
) -> None:
    """Show what the trainer tells until it ends."""
    steps = screen.add_task(f"{outcome.placement}: steps", total=num_steps)
    work = screen.add_task("", total=None, visible=False)
    began_s = screen.get_time()
    assert trainer.stdout is not None
    for line in trainer.stdout:
        event = json.loads(line)
        match event["event"]:
            case "PhaseEntered":
                screen.reset(work, description=f"  {event['phase']}", total=None, visible=True)
            case "SamplesDone":
                screen.update(work, completed=event["done"], total=event["total"])
            case "StepTrained":
                metrics = event["metrics"]
                screen.console.print(
                    f"  step {event['step'] + 1}: loss {metrics['reverse_kl']:.3f},"
                    f" reward {metrics['reward']:.2f}",
                    highlight=False,
                )
            case "StepEnded":
                outcome.step_s.append(screen.get_time() - began_s)
                began_s = screen.get_time()
                screen.advance(steps)
    screen.remove_task(work)


def report(outcomes: list[Outcome], folder: Path, console: Console) -> int:
    """Tables, the check, and the picture."""
    seen = {one.placement: records(one.folder) for one in outcomes}
    timelines = {one.placement: one.timeline for one in outcomes}
    step_s = {one.placement: one.step_s for one in outcomes}
    console.print()
    console.print(loss_table(seen, step_s))
    console.print(placement_table(timelines, step_s))
    page = placement_markdown(timelines, step_s)
    (folder / "table.md").write_text(page, encoding="utf-8")
    picture = draw(timelines, folder / "timeline.svg")
    console.print(f"Who was where when: {picture}", highlight=False)
    if len(outcomes) == 1:
        return 0
    wrong = differences(*seen.values())
    digests = {final_digest(one.folder) for one in outcomes}
    if wrong or len(digests) != 1:
        found = "; ".join(wrong) or "the weights after the last step"
        console.print(f"[bold red]split and defer differ[/]: {found}")
        return 1
    samples = [sample for record in seen[outcomes[0].placement] for sample in record.samples]
    num_tokens = sum(sample.response_length for sample in samples)
    console.print(
        f"Exactly the same in both: {len(samples)} answers with their rewards, {num_tokens}"
        f" log-probabilities of student and teacher, and the weights at the end (sha256"
        f" {digests.pop()[:12]}).",
        highlight=False,
    )
    return 0


def assigned(given: argparse.Namespace) -> dict[str, object]:
    """What is set over the file's keys."""
    values: dict[str, object] = {"placement.device_memory_mib": TINY_MIB} if given.tiny else {}
    if given.tiny or not has_native_operators():
        # Plain torch gives the same bits only to one request at a time. The three engines of the
        # file have these keys in one mapping.
        engine = "roles.rollout.models.student.engine_args"
        values |= {f"{engine}.native_operators": "off", f"{engine}.max_batch_size": 1}
    return values


def has_native_operators() -> bool:
    """Whether there is a compiler for them, and a processor that they run on."""
    import torch

    from phalanx.device.operators import create_operators

    try:
        create_operators("required", "cpu", torch.float32)
    except (MissingDependencyError, OSError):
        return False
    return True


def trainer_arguments(
    control_url: str, gateway_url: str, models: Models, given: argparse.Namespace, out: Path
) -> list[str]:
    return [
        *("--control", control_url, "--gateway", gateway_url),
        *("--student", models.student, "--out", str(out.absolute())),
        *("--steps", str(given.steps), "--samples", str(given.samples)),
        *("--tokens", str(given.tokens), "--seed", str(given.seed)),
    ]


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """The process, which has ended when this has."""
    with process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as screen:
        yield screen


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends all of it in order; further ones change nothing."""

    def stop(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rl_demo.py", description=__doc__)
    parser.add_argument("--placement", choices=(*PLACEMENTS, "both"), default="both")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4, help="answers to each question")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="where checkpoints, batches and the picture go; goes on there"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="random models of two layers, which take seconds"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
