"""The pool outlives the gateway: what is written, when, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from phalanx.errors import ConfigurationError
from phalanx.gateway.state_file import SavedServer, StateFile
from phalanx.routing.endpoint import Endpoint, Scheme
from phalanx.routing.snapshot import ServerState
from tests.gateway.policy_servers import run
from tests.gateway.whole import ProbedServer, ask, asked, ready, running

SERVERS = (SavedServer("pi05", "127.0.0.1:1", True), SavedServer("π", "http://[::1]:2", False))


def test_what_is_saved_is_loaded(tmp_path):
    file = StateFile(tmp_path / "new" / "pool.json")
    assert file.servers == ()
    for servers in (SERVERS, ()):
        file.save(servers)
        file.close()
        file = StateFile(tmp_path / "new" / "pool.json")
        assert file.servers == servers
    file.close()
    assert sorted(os.listdir(tmp_path / "new")) == ["pool.json", "pool.json.lock"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "malformed|truncated|empty"),
        (b"\xff\xfe", "not a gateway's state"),
        (b'{"format": 1, "servers": [{"model_name": "m"', "truncated"),
        (b'{"format": 2, "servers": []}', "format is 2, not 1"),
        (b'{"format": 1}', "missing required field `servers`"),
        (b'{"format": 1, "servers": [], "more": 1}', "unknown field `more`"),
        (
            b'{"format": 1, "servers": [{"model_name": "m", "endpoint": "h", "managed": true}]}',
            "has no port",
        ),
        (
            b'{"format": 1, "servers": [{"model_name": "", "endpoint": "h:1", "managed": true}]}',
            "model name",
        ),
    ],
)
def test_a_corrupt_file_is_refused_in_words_and_left_as_it_is(tmp_path, text, says):
    path = tmp_path / "pool.json"
    path.write_bytes(text)

    async def scenario():
        with pytest.raises(ConfigurationError, match=says) as refused:
            async with running(state_file=path):
                pass
        assert f"--state-file {path}" in str(refused.value)
        assert "move it away" in str(refused.value)

    run(scenario())
    assert path.read_bytes() == text


def test_two_gateways_do_not_share_a_file(tmp_path):
    first = StateFile(tmp_path / "pool.json")
    with pytest.raises(ConfigurationError, match="in use by another gateway.*--follow"):
        StateFile(tmp_path / "pool.json")
    first.close()
    StateFile(tmp_path / "pool.json").close()


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="--state-file .*file/pool.json cannot be used"):
        StateFile(tmp_path / "file" / "pool.json")


def test_servers_are_there_after_a_restart_and_probed_before_they_get_requests(tmp_path):
    path = tmp_path / "pool.json"

    async def scenario():
        server, other = ProbedServer(), ProbedServer()
        await other.start()
        async with running(server, state_file=path) as gateway:
            gateway.pool.registry.register_self("pi05", other.endpoint)
            body = {"model_name": "act", "endpoint": "127.0.0.1:1"}
            added = await asked(gateway, "POST", "/v1/backends", body)
            assert "act" in path.read_text(), "it is on disk when the answer is there"
            before = gateway.pool.snapshot.by_id.keys()
            epoch = gateway.pool.snapshot.epoch
        await other.stop()
        async with running(state_file=path) as gateway:
            snapshot = gateway.pool.snapshot
            assert snapshot.epoch != epoch
            assert snapshot.by_id.keys() == before
            managed = {each.endpoint: each.managed for each in snapshot.servers}
            assert (managed[server.endpoint], managed[other.endpoint]) == (True, False)
            assert all(each.state is not ServerState.READY for each in snapshot.servers)
            assert (
                await ask(gateway, "DELETE", f"/v1/backends/{added['server_id']}")
            ).status == 204
            assert "act" not in path.read_text()

    run(scenario())


def test_a_disk_that_takes_nothing_is_told_to_who_registers(tmp_path):
    path = tmp_path / "pool.json"

    async def scenario():
        async with running(state_file=path) as gateway:
            path.with_name("pool.json.new").mkdir()
            body = {"model_name": "act", "endpoint": "127.0.0.1:1"}
            answer = await ask(gateway, "POST", "/v1/backends", body)
            assert answer.status == 500
            assert "the state file cannot be written" in json.loads(answer.body)["error"]["message"]
            path.with_name("pool.json.new").rmdir()
            await asked(gateway, "POST", "/v1/backends", {**body, "endpoint": "127.0.0.1:2"})
            assert len(json.loads(path.read_text())["servers"]) == 2

    run(scenario())


def test_many_changes_at_once_end_in_a_file_that_has_them_all(tmp_path):
    path = tmp_path / "pool.json"

    async def scenario():
        async with running(state_file=path) as gateway:
            registry = gateway.pool.registry
            for port in range(1, 200):
                registry.register_managed("m", Endpoint.parse(f"127.0.0.1:{port}"))
                if port % 10 == 0:
                    await asyncio.sleep(0)
            assert await gateway._saved() == ""
            assert len(json.loads(path.read_text())["servers"]) == 199

    run(scenario())


def test_a_server_that_came_back_is_ready_after_a_restart(tmp_path):
    async def scenario():
        server = ProbedServer()
        async with running(server, state_file=tmp_path / "pool.json") as gateway:
            await ready(gateway, 1)
        again = ProbedServer(port=server.endpoint.port)
        await again.start()
        async with running(state_file=tmp_path / "pool.json") as gateway:
            await ready(gateway, 1)
        await again.stop()

    run(scenario())


def test_the_file_is_whole_when_the_gateway_has_closed(tmp_path):
    path = tmp_path / "pool.json"

    async def scenario():
        async with running(state_file=path) as gateway:
            gateway.pool.registry.register_managed("m", Endpoint.parse("127.0.0.1:1"))
            await gateway.close(drain_s=0.0)
            assert len(json.loads(path.read_text())["servers"]) == 1

    run(scenario())


def test_a_server_that_is_on_its_way_out_does_not_come_back(tmp_path):
    path = tmp_path / "pool.json"

    async def scenario():
        async with running(ProbedServer(), state_file=path) as gateway:
            await ready(gateway, 1)
            with gateway.pool.acquire("pi05", Scheme.GRPC) as ticket:
                gone = f"/v1/backends/{ticket.server.server_id}"
                assert (await ask(gateway, "DELETE", gone)).status == 204
                assert json.loads(path.read_text())["servers"] == []

    run(scenario())
