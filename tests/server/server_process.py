"""A server of the scripted model in a process of its own, which can be signalled and killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from phalanx import Engine
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.schema.server_config import ServerConfig
from phalanx.server.main import run_server
from tests.server.scripted_text import ScriptedArgs, ScriptedServing, ScriptedText

ROOT = Path(__file__).parents[2]


def engine_of(model_dir: Path, **script: object) -> Engine:
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
    return Engine(EngineArgs("scripted_text", ScriptedArgs(model_dir, **script), config))


def serving_of(model_dir: Path) -> ScriptedServing:
    return ScriptedText.serving(ScriptedArgs(model_dir))


class ServerProcess:
    """Ready when built; each tick of its model takes a millisecond."""

    def __init__(self, model_dir: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.server_process", str(model_dir)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("Phalanx is ready on http://127.0.0.1:"), line
        self.url = line.split()[-1]

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


def main() -> int:
    directory = Path(sys.argv[1])
    Engine.register(ScriptedText)
    return run_server(
        lambda: engine_of(directory, pace_s=0.001), serving_of(directory), ServerConfig(port=0)
    )


if __name__ == "__main__":
    sys.exit(main())
