"""`phalanx top` and the info route of a real server."""

from __future__ import annotations

import pytest

from phalanx import DeploymentConfig, DeviceConfig, Engine, EngineArgs, EngineConfig
from phalanx.cli.main import main
from phalanx.schema.server_config import ServerConfig
from phalanx.server import WorkerSupervisorConfig
from phalanx.testing.echo import Echo, EchoArgs
from tests.server.running import running


def top(capsys, *arguments: str) -> tuple[int | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["top", *arguments, "--once"])
    return (ended.value.code, *capsys.readouterr())


def test_r114_top_shows_what_the_server_answered(serve, capsys):
    with serve() as server, server.client() as client:
        client.post("/generate", json={"text": "abc"})
        client.post("/generate", json={"text": "a", "sampling_params": {"sampling_seed": 666}})
        code, out, _ = top(capsys, server.url)
        info = client.get("/server_info").json()
    assert code in (0, None)
    title, _, replica, total = out.splitlines()
    assert title.startswith("tiny-script (scripted_text) at http://127.0.0.1:")
    name, per_s, failed, in_flight, queue_ms, exec_ms, busy, *_ = replica.split()
    assert (name, failed, in_flight) == ("0", "1", "0")
    assert float(per_s) > 0
    assert float(queue_ms) >= 0
    assert float(exec_ms) >= 0
    assert 0 <= float(busy) <= 100
    assert total.split()[0] == "all"
    (engine,) = info["internal_states"]
    (one,) = engine["replicas"]
    assert (one["num_completed"], one["num_failed"], one["num_in_flight"]) == (1, 1, 0)
    assert sum(one["queue_time_counts"]) == 2
    assert 0 < one["busy_s"] <= one["uptime_s"]
    assert engine["num_completed"] == 1


def test_server_info_tells_deployment_and_topology(serve):
    with serve() as server, server.client() as client:
        info = client.get("/server_info").json()
    assert (info["mode"], info["tp_size"], info["pp_size"]) == ("inline", 1, 1)
    assert info["deployment"]["replica_count"] == 1
    assert info["parallel"]["world_size"] == 1


def test_server_info_hides_the_workers_environment():
    process = WorkerSupervisorConfig(extra_env=(("TOKEN", "secret-1"),))
    config = EngineConfig(device=DeviceConfig("cpu", "float32"))
    if Echo.name not in Engine.registered():
        Engine.register(Echo)

    def load() -> Engine:
        deployment = DeploymentConfig(process_config=process)
        return Engine(EngineArgs("echo", EchoArgs(), config), deployment=deployment)

    with running(load, None, ServerConfig(port=0)) as server, server.client() as client:
        text = client.get("/server_info").text
    assert '"extra_env":{"TOKEN":"(set)"}' in text
    assert "secret-1" not in text


def test_top_needs_the_servers_key(serve, capsys):
    with serve(server={"api_key": "secret-1"}) as server:
        code, _, err = top(capsys, server.url)
        assert code == 2
        assert "it asks for a key" in err
        code, out, _ = top(capsys, server.url, "--api-key", "secret-1")
    assert code in (0, None)
    assert "tiny-script" in out
