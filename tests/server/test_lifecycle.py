"""A server from its first answer while it loads to its last while it drains."""

import signal
import threading

import httpx
import pytest

from phalanx import Engine
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.errors import CheckpointError, ConfigurationError
from phalanx.schema.server_config import ServerConfig
from tests.server.running import RunningServer, running
from tests.server.scripted_text import ScriptedArgs
from tests.server.server_process import ServerProcess, engine_of, serving_of
from tests.server.test_control import ENDLESS, Streamed, load, until


def test_port_answers_while_the_engine_loads(model_dir):
    loaded = threading.Event()

    def factory() -> Engine:
        loaded.wait()
        return engine_of(model_dir)

    server = RunningServer(factory, serving_of(model_dir), ServerConfig(port=0))
    with server.client() as client:
        for path in ("/health", "/ready", "/health_generate", "/model_info"):
            assert client.get(path).status_code == 503
        response = client.post("/generate", json={"text": "a"})
        assert response.status_code == 503
        assert "starting" in response.text
        assert response.headers["retry-after"] == "1"
        loaded.set()
        server.ready.result()
        assert client.get("/health").status_code == 200
        assert client.post("/generate", json={"text": "a"}).status_code == 200
    server.stop()
    server.join()
    assert server.engine.closed


def test_stop_while_loading_closes_the_engine_that_comes_too_late(model_dir):
    loaded = threading.Event()
    closed = threading.Event()

    class Late(Engine):
        def close(self) -> None:
            super().close()
            closed.set()

    def factory() -> Engine:
        loaded.wait()
        config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
        return Late(EngineArgs("scripted_text", ScriptedArgs(model_dir), config))

    server = RunningServer(factory, serving_of(model_dir), ServerConfig(port=0))
    server.bound.result()
    server.stop()
    server.join()
    assert server.ended.exception() is None
    loaded.set()
    closed.wait()


def test_failure_to_load_is_raised_after_the_port_is_closed(model_dir):
    def factory() -> Engine:
        raise CheckpointError("model.safetensors is truncated")

    server = RunningServer(factory, serving_of(model_dir), ServerConfig(port=0))
    server.join()
    with pytest.raises(CheckpointError, match="truncated"):
        server.ended.result()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_port_in_use_is_named(serve, model_dir):
    with serve() as server:
        port = int(server.url.rsplit(":", 1)[1])
        second = RunningServer(
            lambda: engine_of(model_dir), serving_of(model_dir), ServerConfig(port=port)
        )
        second.join()
        with pytest.raises(ConfigurationError, match=f"port={port}"):
            second.ended.result()


def test_drain_finishes_what_runs_and_takes_nothing_new(serve):
    with serve(pace_s=0.001) as server, server.client() as client:
        sampling = {"ignore_eos": True, "max_new_tokens": 300}
        stream = Streamed(server, text="abc", sampling_params=sampling)
        server.stop()
        until(lambda: client.get("/health").status_code == 503)
        refused = client.post("/generate", json={"text": "a"})
        assert refused.status_code == 503
        assert "draining" in refused.text
        assert client.get("/ready").status_code == 503
        rest = stream.rest()
        assert b'"type":"length","length":300' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        stream.close()
        server.join()
        assert server.ended.exception() is None


def test_drain_aborts_what_takes_too_long(serve):
    with serve(pace_s=0.001, server={"drain_timeout_s": 0.1}) as server:
        stream = Streamed(server, text="abc", sampling_params=ENDLESS)
        server.stop()
        assert b'"type":"abort"' in stream.rest()
        stream.close()
        server.join()
        assert server.engine.closed


def test_second_stop_does_not_wait(serve):
    with serve(pace_s=0.001, server={"drain_timeout_s": 3600.0}) as server:
        stream = Streamed(server, text="abc", sampling_params=ENDLESS)
        server.stop()
        server.stop()
        assert b'"type":"abort"' in stream.rest()
        stream.close()
        server.join()


def test_engine_that_is_closed_under_the_server_is_503(serve):
    with serve() as server, server.client() as client:
        server.engine.close()
        for stream in (False, True):
            response = client.post("/generate", json={"text": "a", "stream": stream})
            assert response.status_code == 503
        assert client.get("/health").status_code == 503
        assert client.get("/health_generate").status_code == 503


def test_engine_close_ends_open_requests(serve):
    with serve(pace_s=0.001) as server, server.client() as client:
        stream = Streamed(server, text="abc", sampling_params=ENDLESS)
        server.engine.close()
        rest = stream.rest()
        assert b'"error"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        stream.close()
        until(lambda: load(client)["num_total_reqs"] == 0)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
def test_signal_drains_a_real_process(model_dir, number):
    body = {"text": "abc", "stream": True}
    body["sampling_params"] = {"ignore_eos": True, "max_new_tokens": 200}
    with ServerProcess(model_dir) as server:
        with (
            httpx.Client(base_url=server.url, timeout=60.0, verify=False) as client,
            client.stream("POST", "/generate", json=body) as response,
        ):
            chunks = response.iter_bytes()
            next(chunks)
            server.send_signal(number)
            rest = b"".join(chunks)
        assert b'"type":"length","length":200' in rest
        assert server.wait() == 0


def test_runs_without_text(scripted_plugin):
    from phalanx.testing.counting import Counting, CountingArgs

    if Counting.name not in Engine.registered():
        Engine.register(Counting)
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
    args = EngineArgs("counting", CountingArgs(), config)
    with running(lambda: Engine(args), None, ServerConfig(port=0)) as server:
        with server.client() as client:
            response = client.post("/generate", json={"text": "a"})
            assert response.status_code == 404
            assert "/infer" in response.text
            assert client.get("/v1/models").status_code == 404
            assert client.get("/health_generate").status_code == 200
            assert client.get("/model_info").json()["model_path"] == "counting"
