"""SGLang and sglang-router as a job needs them: looked for, and not loaded, in the environment that
would start them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.errors import ConfigurationError
from phalanx.roles.config import JobConfig
from phalanx.schema.roles import EngineKind

_VERSION = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec(sys.argv[1]) is None:
    sys.exit(3)
try:
    print(importlib.metadata.version(sys.argv[2]))
except importlib.metadata.PackageNotFoundError:
    print("of no version")
"""
_ABSENT = 3


@dataclass(frozen=True)
class PeerPackage:
    """One of them. `python` None: the interpreter that runs this. `needed`: the job starts it."""

    name: str
    module: str
    key: str
    asked_by: str
    python: str | None
    needed: bool

    @property
    def where(self) -> str:
        return self.python or sys.executable

    def version(self) -> str | None:
        """None where it is not installed. Raises `ConfigurationError` for no interpreter."""
        command = [self.where, "-c", _VERSION, self.module, self.name.lower()]
        try:
            ran = subprocess.run(command, check=False, capture_output=True, text=True)
        except OSError as error:
            raise ConfigurationError(
                f"launcher.{self.key}={self.python!r} cannot be run: {error.strerror}"
            ) from None
        if ran.returncode not in (0, _ABSENT):
            last = (ran.stderr.strip().splitlines() or ["it ends at once"])[-1]
            raise ConfigurationError(f"launcher.{self.key}={self.python!r} is no Python: {last}")
        return ran.stdout.strip() if ran.returncode == 0 else None

    def check(self) -> None:
        """Refuse a job that starts it where it is not."""
        if self.needed and self.version() is None:
            raise ConfigurationError(
                f"{self.asked_by} needs {self.name}, which {self.where} does not have;"
                f" set launcher.{self.key} to the interpreter of an environment with it"
            )


def peer_packages(job: JobConfig) -> Iterator[PeerPackage]:
    """Those that the job starts, or has named an interpreter for."""
    models = [model for role in job.roles for model in role.models]
    engines = {group.engine for model in models for group in model.engine_groups}
    routed = any(model.needs_router and model.router_url is None for model in models)
    given = job.launcher
    for package in (
        PeerPackage(
            "SGLang",
            "sglang",
            "sglang_python",
            "engine: sglang",
            given.sglang_python,
            EngineKind.SGLANG in engines,
        ),
        PeerPackage(
            "sglang-router",
            "sglang_router",
            "router_python",
            "route_mode: sglang_router",
            given.router_python,
            routed,
        ),
    ):
        if package.needed or package.python is not None:
            yield package
