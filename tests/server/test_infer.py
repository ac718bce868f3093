"""`POST /infer` serves any plugin's own request, with nothing in the server changed for it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from phalanx import Engine, Entry
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, EntryArgs, RuntimeConfig
from phalanx.schema.server_config import ServerConfig
from phalanx.testing.counting import Counting, CountingArgs
from tests.server.running import RunningServer, running

CONFIG = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))


@dataclass(frozen=True)
class ScaleArgs(EntryArgs):
    factor: float = 2.0


@dataclass(frozen=True)
class ScaleRequest:
    values: np.ndarray


@dataclass(frozen=True)
class ScaleOutput:
    values: np.ndarray


class Scale(Entry):
    """A plain `Entry` of arrays."""

    name = "scale"
    args_cls = ScaleArgs
    request_cls = ScaleRequest
    output_cls = ScaleOutput

    def setup(self, args: ScaleArgs) -> None:
        self._factor = args.factor

    def step(self, request: ScaleRequest) -> ScaleOutput:
        return ScaleOutput(request.values * self._factor)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    if Counting.name not in Engine.registered():
        Engine.register(Counting)
    args = EngineArgs("counting", CountingArgs(), CONFIG)
    with running(lambda: Engine(args), None, ServerConfig(port=0)) as running_server:
        yield running_server


def test_batching_plugin(client):
    assert client.post("/infer", json={"count": 3}).json() == {"numbers": [0, 1, 2]}


def test_stream(client):
    text = client.post("/infer", params={"stream": "true"}, json={"count": 3}).text
    assert text.startswith("event: delta\ndata: ")
    assert text.endswith('event: final\ndata: {"numbers":[0,1,2]}\n\n')


@pytest.mark.parametrize(
    "body", [b"{", b"{}", b'{"count": "a"}', b'{"count": -1}', b'{"count": 10000}', b"[]"]
)
def test_bad_requests(client, body):
    for stream in ("false", "true"):
        response = client.post("/infer", params={"stream": stream}, content=body)
        assert response.status_code == 400


@pytest.mark.parametrize("body", [b'{"count": ' + b"[" * 100_000, b"[" * 100_000])
def test_deeply_nested_json(client, body):
    for stream in ("false", "true"):
        response = client.post("/infer", params={"stream": stream}, content=body)
        assert response.status_code == 400, response.text


def test_json_that_a_free_form_field_takes_in_too_deeply():
    if Scale.name not in Engine.registered():
        Engine.register(Scale)
    args = EngineArgs("scale", ScaleArgs(3.0), CONFIG)
    with running(lambda: Engine(args), None, ServerConfig(port=0)) as server:
        with server.client() as client:
            response = client.post("/infer", content=b'{"values": ' + b"[" * 100_000)
            assert response.status_code == 400
            assert "nested too deeply" in response.json()["message"]


def test_failure(client):
    body = {"count": 1, "fault": "fail"}
    for stream in ("false", "true"):
        response = client.post("/infer", params={"stream": stream}, json=body)
        assert response.status_code == 500
        assert "fails as it was told to" in response.json()["error"]["message"]


def test_abort_by_rid(client):
    client.post("/pause_generation", json={"mode": "in_place"})
    response = client.post("/abort_request", json={"abort_all": True})
    assert response.content == b""
    client.post("/continue_generation")


def test_plain_entry_of_arrays():
    if Scale.name not in Engine.registered():
        Engine.register(Scale)
    args = EngineArgs("scale", ScaleArgs(3.0), CONFIG)
    with running(lambda: Engine(args), None, ServerConfig(port=0)) as server:
        with server.client() as client:
            answer = client.post("/infer", json={"values": [1, 2.5]}).json()
            assert answer == {"values": [3.0, 7.5]}
            pause = client.post("/pause_generation")
            assert pause.status_code == 400
            assert "control" in pause.json()["error"]["message"]


def test_plugin_that_breaks_makes_the_server_unhealthy():
    if Counting.name not in Engine.registered():
        Engine.register(Counting)
    args = EngineArgs("counting", CountingArgs(), CONFIG)
    with running(lambda: Engine(args), None, ServerConfig(port=0)) as server:
        with server.client() as client:
            assert client.get("/health").status_code == 200
            response = client.post("/infer", json={"count": 1, "fault": "tick"})
            assert response.status_code == 503
            health = client.get("/health")
            assert health.status_code == 503
            assert "'counting' failed" in health.text
            assert client.post("/infer", json={"count": 1}).status_code == 503
