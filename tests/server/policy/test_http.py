"""The HTTP port of a policy server: actions as MessagePack, openpi's socket, health, metrics."""

from __future__ import annotations

import queue
import re

import httpx
import numpy as np
import pytest

from phalanx.schema.observation import Observation
from phalanx.testing.policy import FakePolicyArgs, Gate, fake_actions
from phalanx.wire.msgpack_numpy import pack, unpack
from tests.server.policy.openpi_client import OpenpiConnection, Rejected
from tests.server.policy.running import seen, serving

ACTIONS = "/v1/actions/generations"
MSGPACK = {"content-type": "application/msgpack"}
ARGS = FakePolicyArgs(cameras=("main_images", "wrist_images"))
IMAGE = np.full((8, 6, 3), 2, np.uint8)
STATE = np.arange(4, dtype=np.float32)


def body(instruction: str = "", **fields: object) -> dict:
    observation = {
        "main_images": IMAGE[None],
        "states": STATE[None],
        "task_descriptions": [instruction],
    }
    return {"model_name": "fake", "observation": observation, **fields}


def frame(instruction: str = "", **fields: object) -> dict:
    return {
        "observation/main_images": IMAGE,
        "observation/state": STATE,
        "prompt": instruction,
        **fields,
    }


EXPECTED = fake_actions(ARGS, Observation(images={"main_images": IMAGE}, state=STATE))


@pytest.fixture(scope="module")
def server():
    with serving(ARGS, http_port=0) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with server.http() as client:
        yield client


def post(http: httpx.Client, value: object, **headers: str) -> httpx.Response:
    return http.post(ACTIONS, content=pack(value), headers={**MSGPACK, **headers})


def test_actions_for_a_batch(http):
    response = post(http, body())
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/msgpack"
    assert np.array_equal(unpack(response.content)["actions"], EXPECTED)


def test_actions_in_the_other_envelope(http):
    call = body()
    response = post(http, {"model": "fake", "input": call["observation"], "runtime": {"step": 3}})
    values = unpack(response.content)["data"][0]["action"]["values"]
    assert np.array_equal(values, EXPECTED)


def test_a_robot_over_openpi_gets_metadata_and_actions_with_times(server):
    with OpenpiConnection(server.url) as robot:
        assert robot.metadata == {
            "model_name": "fake",
            "policy": "fake_policy",
            "cameras": ["main_images", "wrist_images"],
            "state_dim": 4,
            "action_dim": 3,
            "horizon": 5,
        }
        first, second = robot.infer(frame()), robot.infer(frame())
    for answer in (first, second):
        assert np.array_equal(answer["actions"], EXPECTED[0])
        assert answer["server_timing"]["infer_ms"] >= answer["policy_timing"]["infer_ms"] > 0
    assert "prev_total_ms" not in first["server_timing"]
    assert second["server_timing"]["prev_total_ms"] > 0


def test_an_openpi_connection_goes_on_after_a_failed_request(server):
    with OpenpiConnection(server.url) as robot:
        assert robot.infer(frame("fail")) == ("the policy failed; the log of its server tells why")
        assert np.array_equal(robot.infer(frame())["actions"], EXPECTED[0])


def test_observations_sent_ahead_are_answered_in_order(server):
    with OpenpiConnection(server.url) as robot:
        for step in range(3):
            robot.send(pack(frame(**{"observation/state": STATE + step})))
        sums = [robot.answer()["actions"][0, 0] for _ in range(3)]
    assert sums == [8.0, 12.0, 16.0]


def test_a_robot_that_hangs_up_ends_its_request_in_the_engine():
    arrived: queue.Queue[str] = queue.Queue()
    args = FakePolicyArgs(gate=Gate(arrived.put))
    with serving(args, http_port=0) as server:
        robot = OpenpiConnection(server.url)
        robot.send(pack({"prompt": "hold"}))
        assert arrived.get() == "hold"
        robot.close()
        assert arrived.get() == "cancelled hold"


def test_a_caller_that_hangs_up_ends_its_request_in_the_engine():
    arrived: queue.Queue[str] = queue.Queue()
    gate = Gate(arrived.put)
    with serving(FakePolicyArgs(gate=gate), http_port=0) as server, server.http() as http:
        call = {"observation": {"task_descriptions": "hold"}}
        with pytest.raises(httpx.ReadTimeout):
            http.post(ACTIONS, content=pack(call), headers=MSGPACK, timeout=0.2)
        assert arrived.get() == "hold"
        assert arrived.get() == "cancelled hold"


def test_health_and_the_routes_of_every_plugin(server, http):
    for path in ("/health", "/healthz", "/ready"):
        assert http.get(path).status_code == 200
    assert http.get("/healthz").text == "OK\n"
    assert http.get("/server_info").json()["served_model_name"] == "fake"
    assert http.post("/generate", json={}).status_code == 404


def test_r114_completed_requests_queue_time_and_utilization_are_measured(http):
    def value(name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", http.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    names = (
        'phalanx_requests_total{outcome="completed"}',
        'phalanx_replica_requests_total{outcome="completed",replica="0"}',
        'phalanx_queue_time_seconds_count{replica="0"}',
        'phalanx_policy_stage_seconds_count{stage="prepare"}',
        'phalanx_policy_stage_seconds_count{stage="compute"}',
        'phalanx_policy_stage_seconds_count{stage="finish"}',
    )
    before = [value(name) for name in names]
    busy = value('phalanx_replica_busy_seconds_total{replica="0"}')
    post(http, body())
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [1.0] * 6
    assert value('phalanx_replica_busy_seconds_total{replica="0"}') > busy
    assert value('phalanx_queue_time_seconds_sum{replica="0"}') > 0
    assert "phalanx_replica_device_utilization" in http.get("/metrics").text


def test_a_broken_engine_is_unhealthy_on_every_protocol():
    with serving(ARGS, http_port=0) as server, server.http() as http:
        response = post(http, body("break"))
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "unavailable"
        assert "secret" not in response.text
        assert http.get("/healthz").status_code == 503
        assert http.get("/health").status_code == 503
        with OpenpiConnection(server.url) as robot:
            assert "can no longer serve" in robot.infer(frame())


def test_a_key_is_asked_for_on_every_protocol():
    with serving(ARGS, http_port=0, api_key="k1") as server, server.http() as http:
        refused = post(http, body())
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert post(http, body(), authorization="Bearer k1").status_code == 200
        assert http.get("/healthz").status_code == 200
        with pytest.raises(Rejected, match="Authorization: Bearer KEY"):
            OpenpiConnection(server.url)
        with OpenpiConnection(server.url, {"Authorization": "Api-Key k1"}) as robot:
            robot.infer(frame())


def test_a_stop_says_so_to_connected_robots():
    arrived: queue.Queue[str] = queue.Queue()
    gate = Gate(arrived.put)
    args = FakePolicyArgs(gate=gate)
    with serving(args, http_port=0, grace_seconds=60.0) as server, server.client() as client:
        with OpenpiConnection(server.url) as robot, OpenpiConnection(server.url) as other:
            robot.send(pack({"prompt": "hold"}))
            assert arrived.get() == "hold"
            server.stop()
            while client.healthy():
                pass
            assert "the server is draining" in other.infer({"prompt": "go on"})
            with pytest.raises(Rejected, match="the server is draining"):
                OpenpiConnection(server.url)
            gate.open()
            assert robot.answer()["actions"].shape == (5, 3)
            with pytest.raises(ConnectionError):
                other.receive()


def test_all_protocols_share_the_engine():
    """Each request ends only when all three are in the model at once."""
    with serving(http_port=0) as server, server.client() as client, server.http() as http:
        with OpenpiConnection(server.url) as robot:
            future = client.future(seen("meet 3"))
            robot.send(pack({"prompt": "meet 3"}))
            call = {"observation": {"task_descriptions": "meet 3"}}
            assert post(http, call).status_code == 200
            assert robot.answer()["actions"].shape == (5, 3)
            assert future.result()
