"""Two models to distil from and to, behind servers of their own, for the examples of distillation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from phalanx.testing.tiny_llama import write_tiny_llama


@dataclass(frozen=True)
class Served:
    """`model` is the directory that the student's server began with."""

    model: Path
    student_url: str
    teacher_url: str


@contextmanager
def tiny_models(directory: Path) -> Iterator[Served]:
    """A student and a teacher of two layers with random weights, on free ports of this machine."""
    folders = [directory / "student", directory / "teacher"]
    for seed, folder in enumerate(folders):
        folder.mkdir(parents=True)
        write_tiny_llama(folder, seed)
    with ExitStack() as stack:
        student = stack.enter_context(_served(folders[0], "dynamic"))
        teacher = stack.enter_context(_served(folders[1], "static"))
        yield Served(folders[0], student, teacher)


@contextmanager
def _served(model: Path, weight_source: str) -> Iterator[str]:
    command = [sys.executable, "-m", "phalanx", "serve", "--model", str(model)]
    flags = ["--port", "0", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
    log = model.with_suffix(".log")
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*command, *flags, "--weight-source", weight_source],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().strip()
            if " at http" not in ready:
                sys.exit(f"the server of {model} did not start; see {log}")
            yield ready.rpartition(" at ")[2]
        finally:
            process.terminate()
