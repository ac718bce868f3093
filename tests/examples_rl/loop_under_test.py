"""The demo's loop on tiny models: `phalanx up`, and a trainer that tells each thing that it does and
waits for an answer, so that a test decides what happens between any two of them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rl.job import Job, JobOptions, start_trainer
from rl.models import Models

from tests.roles.control.whole_job import WholeJob

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINE = "roles.rollout.models.student.engine_args"
DEVICE_MIB = 3
"""Room for one of the engines, whose caches are 2 MiB, or for the trainer."""
Event = dict[str, Any]


class Loop:
    """A job and its trainer. Whoever is killed is started again as a user would start it."""

    def __init__(
        self, placement: str, models: Models, folder: Path, ports: tuple[int, int]
    ) -> None:
        self.folder = folder
        self.models = models
        self.num_trainers = 0
        self._placement = placement
        self._ports = ports
        self._num_jobs = 0
        self._cache = {"PHALANX_CACHE_DIR": str(folder / "cache")}
        self.start_job()

    def start_job(self) -> None:
        control, gateway = self._ports
        self._num_jobs += 1
        options = JobOptions(
            EXAMPLES / "rl" / f"{self._placement}.yaml",
            "loop",
            self.models,
            {
                "placement.device_memory_mib": DEVICE_MIB,
                "control.port": control,
                "gateway.http_port": gateway,
                "log.directory": self.folder / f"logs-{self._num_jobs}",
                f"{ENGINE}.native_operators": "off",
                f"{ENGINE}.max_batch_size": 1,
                f"{ENGINE}.pool_tokens": 8192,
            },
        )
        self.job = Job(options, self._cache)
        self.job.until_up()

    def start_trainer(self, num_steps: int) -> None:
        self.num_trainers += 1
        control, gateway = self._ports
        arguments = [
            *("--control", f"http://127.0.0.1:{control}"),
            *("--gateway", f"http://127.0.0.1:{gateway}"),
            *("--student", self.models.student, "--out", str(self.folder / "out")),
            *("--steps", str(num_steps), "--questions", "2", "--samples", "2", "--tokens", "6"),
            "--paced",
        ]
        environment = {**self._cache, **self.job.trainer_environment}
        self.trainer = start_trainer(arguments, self.folder / "trainer.log", environment)

    def event(self) -> Event | None:
        """What the trainer tells next; None once it has ended."""
        assert self.trainer.stdout is not None
        line = self.trainer.stdout.readline()
        return json.loads(line) if line else None

    def go_on(self) -> None:
        assert self.trainer.stdin is not None
        self.trainer.stdin.write("\n")
        self.trainer.stdin.flush()

    def owners(self) -> set[str]:
        """Who holds memory of a device: roles, and the trainer."""
        return {one.owner.partition("/")[0] for one in self.job.ledger.held()}

    def kill_trainer(self) -> None:
        self.trainer.kill()
        self.close_trainer()

    def kill_control(self) -> None:
        """The control process; whatever it started ends with it."""
        self.job.process.kill()
        self.job.process.wait()
        assert self.job.process.stdout is not None
        self.job.process.stdout.close()

    def kill_gateway(self) -> None:
        os.kill(self._pid(" gateway --roles "), signal.SIGKILL)

    def kill_engine(self, role: str) -> None:
        model = {
            "rollout": self.models.student,
            "genrm": self.models.judge,
            "teacher": self.models.teacher,
        }[role]
        os.kill(self._pid(f"serve --model {model} "), signal.SIGKILL)

    def close_trainer(self) -> int:
        """Its exit status; it is ended where it still runs."""
        if self.trainer.poll() is None:
            self.trainer.terminate()
        with self.trainer:
            pass
        return self.trainer.returncode

    def close(self) -> None:
        self.job.stop()
        assert self.job.process.stdout is not None
        self.job.process.stdout.close()

    def logs(self) -> str:
        """Of everybody, over all lives of the job."""
        files = [*self.folder.glob("logs-*/**/*.log"), self.folder / "trainer.log"]
        return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)

    def _pid(self, words: str) -> int:
        return WholeJob(self.job.process, self.folder / "cache").pid(words)


@contextmanager
def loop(placement: str, models: Models, folder: Path) -> Iterator[Loop]:
    """Nothing of it runs on afterwards."""
    folder.mkdir()
    with ExitStack() as stack:
        ports = (stack.enter_context(held_port()), stack.enter_context(held_port()))
        made = Loop(placement, models, folder, ports)
        try:
            yield made
        finally:
            if made.num_trainers:
                made.close_trainer()
            made.close()


@contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody else gets, and on which whoever is told of it can listen again and again."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
