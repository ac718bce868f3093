"""The processes of the loop: `phalanx up`, and a trainer that has its devices."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.device_ledger import DeviceLedger
from phalanx.settings import child_environment
from rl.models import Models

EXAMPLES = Path(__file__).resolve().parents[1]
PHALANX = str(Path(sys.executable).with_name("phalanx"))
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class StartError(Exception):
    """The job did not come up; what it said is in the message."""


@dataclass(frozen=True)
class JobOptions:
    """A file of this folder, what the job is called, and what is set over the file's keys."""

    file: Path
    name: str
    models: Models
    assigned: Mapping[str, object]

    @property
    def arguments(self) -> list[str]:
        """Those of `phalanx up`."""
        words = [word for each in self.sets for word in ("--set", each)]
        return ["up", str(self.file), "--name", self.name, *words]

    @property
    def sets(self) -> list[str]:
        values = {
            "roles.rollout.models.student.model": self.models.student,
            "roles.genrm.models.judge.model": self.models.judge,
            "roles.teacher.models.whole.model": self.models.teacher,
            **self.assigned,
        }
        return [f"{key}={value}" for key, value in values.items()]


class Job:
    """`phalanx up` until it is stopped."""

    def __init__(self, options: JobOptions, environment: Mapping[str, str] | None = None) -> None:
        self.options = options
        self._environment = child_environment({**ONE_THREAD, **(environment or {})})
        # Ctrl-C is for the program that runs this, which then ends it in order.
        self.process = subprocess.Popen(
            [PHALANX, *options.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
            start_new_session=True,
        )
        self.said: list[str] = []

    def until_up(self) -> None:
        """Raises `StartError` where it ends instead."""
        for line in self._lines():
            if " is up" in line:
                return
        raise StartError(f"the job did not start (status {self.process.wait()}):\n{self.told}")

    @property
    def told(self) -> str:
        return "".join(self.said)

    @cached_property
    def control_url(self) -> str:
        return str(self._status["control_url"])

    @cached_property
    def gateway_url(self) -> str:
        return str(self._status["gateway_url"])

    @cached_property
    def trainer_environment(self) -> dict[str, str]:
        """What tells the trainer its devices."""
        return dict(self._status["trainer_environment"])

    @cached_property
    def ledger(self) -> DeviceLedger:
        """Of the job's simulated devices."""
        file, _, _ = self.trainer_environment["PHALANX_SIMULATED_DEVICES"].rpartition(":")
        return DeviceLedger(Path(file))

    @cached_property
    def _status(self) -> dict[str, Any]:
        """What `phalanx status` says of it."""
        done = subprocess.run(
            [PHALANX, "status", "--json", "--name", self.options.name],
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return dict(json.loads(done.stdout))

    def stop(self) -> int:
        """As Ctrl-C; its exit status, once all of it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        for _ in self._lines():
            pass
        return self.process.wait()

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            yield line


@contextmanager
def running(options: JobOptions, environment: Mapping[str, str] | None = None) -> Iterator[Job]:
    """A job that is up, until the context ends."""
    job = Job(options, environment)
    try:
        job.until_up()
        yield job
    finally:
        job.stop()


def start_trainer(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """The trainer, which tells on its stdout what it does."""
    with log.open("a") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "rl.trainer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=EXAMPLES,
            env=child_environment({**ONE_THREAD, **environment}),
            start_new_session=True,
        )
