"""Which jobs run on this machine: a file a job, which says where its control process is, and a lock
beside it, which that process holds for as long as it lives.

A process that is killed lets go of its lock, so that a file alone means nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from phalanx import settings
from phalanx.errors import ConfigurationError, PhalanxError

DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class NoJobError(PhalanxError, RuntimeError):
    """No job runs here, or none of that name."""


class JobRunsError(ConfigurationError):
    """A job of that name runs already."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a running job. `key` is the one that its control process asks for."""

    name: str
    pid: int
    control_url: str
    gateway_url: str
    config: str
    log_directory: str
    started_wall_s: float
    key: str | None = None


class RunDirectory:
    """Where the jobs of this user are written down; `path` is made where it is missing."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = settings.cache_dir() / "run" if path is None else path

    def fresh_log_directory(self, name: str) -> Path:
        """Where the processes of the job of this name log, once it is claimed; what the one before
        has logged is kept beside it, with `.old` at its end.
        """
        directory = self._path / f"{name}.logs"
        before = directory.with_suffix(".logs.old")
        if directory.exists():
            shutil.rmtree(before, ignore_errors=True)
            directory.rename(before)
        directory.mkdir()
        return directory

    @contextmanager
    def claim(self, name: str, config: str | None = None) -> Iterator[RunFile]:
        """Be the job `name` for as long as this is open. Raises `JobRunsError` where one is.

        Begins when nothing is left of what an earlier one started, whatever has ended that. `config`
        is the path of its file, which tells jobs of the default name apart that run after one
        another: each has a journal of its own.
        """
        check_job_name(name)
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        living = self._path / f"{name}.processes"
        with self._lock(name).open("a") as lock, living.open("a") as processes:
            while not _taken(lock.fileno()):
                # Not by somebody who only looked whether a job has it.
                if _held(lock.fileno()):
                    raise JobRunsError(self._runs(name))
            # Until then some of its last processes may run, and hold memory.
            fcntl.flock(processes, fcntl.LOCK_EX)
            identity = name if config is None or name != DEFAULT_NAME else _identity(config)
            file = RunFile(self._file(name), processes.fileno(), self._path / identity)
            file.remove()
            try:
                yield file
            finally:
                file.remove()

    def find(self, name: str | None) -> RunRecord:
        """The running job of that name, or the only one. Raises `NoJobError`."""
        if name is None:
            running = self.running()
            if len(running) == 1:
                return running[0]
            if not running:
                raise NoJobError("no job is running here; start one with `phalanx up roles.yaml`")
            names = ", ".join(record.name for record in running)
            raise NoJobError(f"several jobs are running: {names}; say which one with --name")
        check_job_name(name)
        record = self._record(name)
        if record is None:
            others = ", ".join(other.name for other in self.running()) or "none"
            raise NoJobError(f"no job {name!r} is running here; running: {others}")
        return record

    def running(self) -> tuple[RunRecord, ...]:
        """Every running job of this user, by name."""
        names = sorted(path.stem for path in self._path.glob("*.json"))
        return tuple(record for name in names if (record := self._record(name)) is not None)

    def wait_for_end(self, name: str) -> None:
        """Until the control process of job `name` is gone; blocks the thread."""
        try:
            lock = self._lock(name).open("a")
        except FileNotFoundError:
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_SH)

    def _record(self, name: str) -> RunRecord | None:
        try:
            with self._lock(name).open("r") as lock:
                if not _held(lock.fileno()):
                    return None
            return msgspec.json.decode(self._file(name).read_bytes(), type=RunRecord)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigurationError(f"cannot read {self._file(name)}: {error}") from None

    def _runs(self, name: str) -> str:
        record = self._record(name)
        where = "is starting" if record is None else f"is running (pid {record.pid})"
        return (
            f"the job {name!r} {where}; end it with `phalanx down --name {name}`, or give this one"
            " another --name"
        )

    def _file(self, name: str) -> Path:
        return self._path / f"{name}.json"

    def _lock(self, name: str) -> Path:
        return self._path / f"{name}.lock"


class PrivateFile:
    """A file for this user's eyes alone."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, content: bytes) -> None:
        """Whole or not at all."""
        whole = self.path.with_suffix(".new")
        opened = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(opened, "wb") as file:
            file.write(content)
        whole.replace(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class RunFile:
    """The file of one job and one for its gateway's keys, which only whoever claimed its name writes;
    and what outlives the job: the journal of its phases, and the ledger of its simulated devices.

    `living` is a file that the job's processes are watched with: whoever ends the last of them keeps
    it open until then. None without a claim. `lasting` begins the name of its journal.
    """

    def __init__(self, path: Path, living: int | None = None, lasting: Path | None = None) -> None:
        self.living = living
        self._file = PrivateFile(path)
        self.keys = PrivateFile(path.with_suffix(".keys"))
        lasting = path.with_suffix("") if lasting is None else lasting
        self.journal = lasting.with_name(f"{lasting.name}.journal")
        self.devices = path.with_suffix(".devices")

    @property
    def path(self) -> Path:
        return self._file.path

    def write(self, record: RunRecord) -> None:
        self._file.write(msgspec.json.format(msgspec.json.encode(record)))

    def remove(self) -> None:
        self._file.remove()
        self.keys.remove()


def check_job_name(name: str) -> None:
    """Refuse what cannot be part of a file's name."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"job name {name!r} must begin with a letter or digit and hold only letters, digits,"
            " '.', '_' and '-', at most 64"
        )


def _identity(config: str) -> str:
    """What a job of the default name is called that has this file; no name that is given is that."""
    digest = hashlib.sha256(os.path.abspath(config).encode()).hexdigest()
    return f"{DEFAULT_NAME}@{digest[:16]}"


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held(lock: int) -> bool:
    """Whether somebody has the lock for himself."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False
