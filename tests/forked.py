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


@dataclass(frozen=True)
class Ran:
    """How a program ended, and what it wrote."""

    returncode: int | None
    stdout: str
    stderr: str


def run_forked(
    program: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Ran:
    """As `python -c program *arguments` in this folder, with this process's environment."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        surroundings = (os.getcwd(), {**os.environ, **(environment or {})})
        process = FORKSERVER.Process(
            target=_run, args=(program, list(arguments), surroundings, files)
        )
        process.start()
        process.join()
        return Ran(process.exitcode, *(Path(file).read_text("utf-8") for file in files))


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
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"]
    vars(main).update({"__name__": "__main__", "__file__": None})
    exec(compile(program, "<string>", "exec"), vars(main))
