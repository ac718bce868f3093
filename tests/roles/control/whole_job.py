"""`phalanx up` as a process, and all processes that belong to it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PHALANX = str(Path(sys.executable).with_name("phalanx"))
ENGINE = (
    "{num_threads: 1, pool_tokens: 4096, device: cpu, log_level: WARNING, native_operators: 'off'}"
)


def job_file(folder: Path, model: Path, replicas: int = 1) -> Path:
    file = folder / "roles.yaml"
    file.write_text(
        "gateway: {http_port: 0}\n"
        "roles:\n"
        "  rollout:\n"
        "    deployment: {health_interval_s: 0.5}\n"
        f"    models: {{student: {{model: {model}, replicas: {replicas}, weight_source: local,"
        f" engine_args: {ENGINE}}}}}\n"
    )
    return file


class WholeJob:
    """One, with what it has printed; its cache directory is what its processes have in common."""

    def __init__(self, process: subprocess.Popen[str], cache: Path) -> None:
        self.process = process
        self.cache = cache
        self.lines: list[str] = []

    def until(self, words: str) -> str:
        """The next printed line that holds these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"it never said {words!r}:\n{''.join(self.lines)}")

    def ready(self) -> str:
        """The gateway's address, once everything is up."""
        return self.until(" is up").partition("status page ")[2].partition("/,")[0]

    def ended(self) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        return self.process.wait()

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PHALANX, *arguments], env=environment(self.cache), capture_output=True, text=True
        )

    def status(self) -> dict[str, Any]:
        return json.loads(self.command("status", "--json").stdout)

    def engines(self) -> list[dict[str, Any]]:
        (role,) = self.status()["roles"]
        return role["document"]["models"]["student"]["engines"]

    def processes(self) -> list[int]:
        """All of its processes, the control process and those that watch over others among them."""
        mark = f"PHALANX_CACHE_DIR={self.cache}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue  # it has ended, or is somebody else's
        return found

    def pid(self, words: str) -> int:
        """The only one with these words in its command line."""
        (found,) = [
            pid
            for pid in self.processes()
            if words in Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
        ]
        return found

    def wait_until_gone(self) -> None:
        """Until none of its processes is left; this one's own children are waited for elsewhere."""
        for pid in self.processes():
            try:
                opened = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                select.select([opened], [], [])
            finally:
                os.close(opened)


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "PHALANX_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}


@contextmanager
def whole_job(
    file: Path, cache: Path, *arguments: str, path: Path | None = None
) -> Iterator[WholeJob]:
    """A job that has begun to start; it is stopped at the end, if it has not ended by itself.

    Its engines find packages in `path` first.
    """
    found = {} if path is None else {"PYTHONPATH": os.pathsep.join([str(path), *sys.path])}
    process = subprocess.Popen(
        [PHALANX, "up", str(file), *arguments],
        env={**environment(cache), **found},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    job = WholeJob(process, cache)
    try:
        yield job
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            job.ended()
        process.stdout.close()
        process.wait()
        if "--detach" in arguments:
            job.command("down", "--now")


def post(
    url: str, body: object, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def get(url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {})) as answer:
        return json.load(answer)
