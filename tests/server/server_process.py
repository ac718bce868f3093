"""A server of the scripted model in a process of its own, which can be signalled and killed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from phalanx import Engine
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.schema.server_config import ServerConfig
from phalanx.server.main import run_server
from tests.forked import Forked
from tests.server.scripted_text import ScriptedArgs, ScriptedServing, ScriptedText


def engine_of(model_dir: Path, **script: object) -> Engine:
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
    return Engine(EngineArgs("scripted_text", ScriptedArgs(model_dir, **script), config))


def serving_of(model_dir: Path) -> ScriptedServing:
    return ScriptedText.serving(ScriptedArgs(model_dir))


class ServerProcess:
    """Ready when built; each tick of its model takes a millisecond."""

    def __init__(self, model_dir: Path) -> None:
        self._process = Forked(
            "import sys; from tests.server.server_process import main; sys.exit(main())",
            [str(model_dir)],
        )
        self._status: int | None = None
        line = self._process.stdout.readline()
        assert line.startswith("Phalanx is ready on http://127.0.0.1:"), line
        self.url = line.split()[-1]

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._status is None:
            self._process.send_signal(signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        """Its exit status; what it has written to stderr by then is shown."""
        if self._status is None:
            ran = self._process.ended()
            sys.stderr.write(ran.stderr)
            assert ran.returncode is not None
            self._status = ran.returncode
        return self._status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


def main() -> int:
    directory = Path(sys.argv[1])
    Engine.register(ScriptedText)
    return run_server(
        lambda: engine_of(directory, pace_s=0.001), serving_of(directory), ServerConfig(port=0)
    )
