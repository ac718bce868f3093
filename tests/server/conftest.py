import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from phalanx import Engine
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.processing.text import TextTokenizer
from phalanx.schema.server_config import ServerConfig
from phalanx.testing.tiny_tokenizer import write_byte_level_tokenizer
from tests.server.running import RunningServer, running
from tests.server.scripted_text import ScriptedArgs, ScriptedText

Serve = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture(scope="session", autouse=True)
def scripted_plugin() -> None:
    if ScriptedText.name not in Engine.registered():
        Engine.register(ScriptedText)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level_tokenizer(tmp_path_factory.mktemp("models") / "tiny-script")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> TextTokenizer:
    return TextTokenizer(model_dir)


@pytest.fixture(scope="session")
def serve(model_dir: Path, scripted_plugin: None) -> Serve:
    """Runs a server of the scripted model; `runtime` and `server` are keyword dictionaries."""

    def start(*, runtime: dict | None = None, server: dict | None = None, **script: object):
        args = ScriptedArgs(model_dir, **script)
        config = EngineConfig(
            device=DeviceConfig("cpu", "float32"),
            runtime=RuntimeConfig(num_threads=1, **(runtime or {})),
        )
        return running(
            lambda: Engine(EngineArgs("scripted_text", args, config)),
            ScriptedText.serving(args),
            ServerConfig(port=0, **(server or {})),
        )

    return start


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[RunningServer]:
    with serve() as running_server:
        yield running_server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


def events(response: httpx.Response) -> list[dict]:
    """The JSON of each event of a stream, which must end with [DONE]."""
    lines = re.findall(r"^data: (.*)$", response.text, re.MULTILINE)
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
