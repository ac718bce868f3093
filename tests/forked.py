"""Programs in processes of their own that begin where torch is imported already, which takes longer
than most of them do.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FORKSERVER = mp.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.parallel.rank_pool"])
PHALANX = "from phalanx.cli.main import main; main()"
"""The program that is installed as `phalanx`."""


@dataclass(frozen=True)
class Ran:
    """How a program ended, and what was left to read of what it wrote."""

    returncode: int | None
    stdout: str
    stderr: str


class Forked:
    """As `python -c program *arguments` in a folder, this one by default, with this process's
    environment and what is added to it.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        files = [str(Path(self._folder.name, name)) for name in ("stdout", "stderr")]
        os.mkfifo(files[0])
        surroundings = (str(folder or Path.cwd()), {**os.environ, **(environment or {})})
        self._process = FORKSERVER.Process(
            target=_run, args=(program, list(arguments), surroundings, files)
        )
        self._process.start()
        self.stdout = open(files[0], encoding="utf-8")

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def ended(self) -> Ran:
        """Wait for its end."""
        with self.stdout, self._folder:
            rest = self.stdout.read()
            self._process.join()
            errors = Path(self._folder.name, "stderr").read_text(encoding="utf-8")
        return Ran(self._process.exitcode, rest, errors)


def run_forked(
    program: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Ran:
    return Forked(program, arguments, environment).ended()


def _run(
    program: str, arguments: list[str], surroundings: tuple[str, dict[str, str]], files: list[str]
) -> None:
    for number, file in enumerate(files, 1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    folder, environment = surroundings
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"]
    vars(main).update({"__name__": "__main__", "__file__": None})
    exec(compile(program, "<string>", "exec"), vars(main))
