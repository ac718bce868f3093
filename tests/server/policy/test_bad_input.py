"""What a robot can get wrong, on each of the three protocols: the error says it in words."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest

from phalanx.schema.observation import Observation
from phalanx.testing.policy import FakePolicyArgs
from phalanx.wire.msgpack_numpy import pack, unpack
from phalanx.wire.robot_inference import InferenceCall, encode_request
from tests.server.policy.openpi_client import OpenpiConnection
from tests.server.policy.running import RunningPolicy, serving

Code = grpc.StatusCode
ACTIONS = "/v1/actions/generations"
MSGPACK = {"content-type": "application/msgpack"}
ARGS = FakePolicyArgs(cameras=("main_images", "wrist_images"))
MAX_BYTES = 40_000
IMAGE = np.full((8, 6, 3), 2, np.uint8)
STATE = np.arange(4, dtype=np.float32)
NAN = np.array([0, np.nan, 0, 0], np.float32)

FIELDS: dict[str, dict[str, object]] = {
    "camera": {"extra": IMAGE},
    "shape": {"main": np.zeros((2, 2, 2, 2, 2), np.uint8)},
    "dtype": {"main": np.zeros((8, 6, 3), np.int64)},
    "width": {"state": np.zeros(6, np.float32)},
    "nan": {"state": NAN},
    "model": {"model": "pi0"},
    "oversize": {"main": np.zeros((200, 200, 3), np.uint8)},
}
"""By what is wrong: what differs from an observation that would do."""


@pytest.fixture(scope="module")
def server():
    options = {"http_port": 0, "max_message_bytes": MAX_BYTES, "max_request_bytes": 1000}
    with serving(ARGS, **options) as running:
        yield running


@pytest.fixture(autouse=True)
def it_serves_on(server):
    """Whatever was sent, the next observation is answered, on every protocol."""
    yield
    assert over_grpc(server, {}) == "OK"
    assert over_http(server, {}) == "OK"
    assert over_openpi(server, {}) == "OK"


def over_grpc(server: RunningPolicy, fields: dict[str, object]) -> str:
    """OK, or the words of the refusal; as a client would send it that checks nothing."""
    images = {
        "main_images": fields.get("main", IMAGE),
        **({"unknown": IMAGE} if "extra" in fields else {}),
    }
    call = InferenceCall("r1", str(fields.get("model", "")), _unchecked(images, fields))
    with server.client() as client:
        try:
            client.raw(encode_request(call))
        except grpc.RpcError as error:
            assert error.code() in (
                Code.INVALID_ARGUMENT,
                Code.NOT_FOUND,
                Code.RESOURCE_EXHAUSTED,
            )
            return error.details()
    return "OK"


def _unchecked(images: dict[str, object], fields: dict[str, object]) -> Observation:
    observation = object.__new__(Observation)
    values = {
        "images": images,
        "state": fields.get("state", STATE),
        "instructions": ("",),
        "batched": False,
        "horizon": None,
        "inputs": {},
        "parameters": {},
    }
    for name, value in values.items():
        object.__setattr__(observation, name, value)
    return observation


def over_http(server: RunningPolicy, fields: dict[str, object]) -> str:
    main = np.asarray(fields.get("main", IMAGE))
    observation = {
        "main_images": main[None],
        "states": np.asarray(fields.get("state", STATE))[None],
        **({"extra_view_images": {"unknown": IMAGE[None]}} if "extra" in fields else {}),
    }
    call = {"model_name": fields.get("model", "fake"), "observation": observation}
    with server.http() as client:
        response = client.post(ACTIONS, content=pack(call), headers=MSGPACK)
    if response.status_code == 200:
        return "OK"
    assert response.status_code in (400, 404, 413)
    assert set(response.json()["error"]) == {"code", "message"}
    return response.json()["error"]["message"]


def over_openpi(server: RunningPolicy, fields: dict[str, object]) -> str:
    frame = {
        "observation/main_images": fields.get("main", IMAGE),
        "observation/state": fields.get("state", STATE),
        **({"observation/unknown": IMAGE} if "extra" in fields else {}),
    }
    with OpenpiConnection(server.url) as robot:
        try:
            answer = robot.infer(frame)
        except ConnectionError as error:
            return str(error)
    return answer if isinstance(answer, str) else "OK"


PROTOCOLS = {"grpc": over_grpc, "http": over_http, "openpi": over_openpi}
WORDS = {
    "camera": "camera 'unknown' is not one of the policy's: main_images, wrist_images",
    "shape": "main_images",
    "dtype": "main_images",
    "width": "the state has 6 numbers; the policy takes 4",
    "nan": "the state is not finite at index 1 (nan)",
    "model": "the model 'pi0' is not served here; this server has 'fake'",
    "oversize": str(MAX_BYTES),
}


CASES = [
    (wrong, protocol)
    for wrong in FIELDS
    for protocol in PROTOCOLS
    # openpi's protocol names no model.
    if (wrong, protocol) != ("model", "openpi")
]


@pytest.mark.parametrize(("wrong", "protocol"), CASES)
def test_it_is_refused_in_words(server, wrong, protocol):
    words = PROTOCOLS[protocol](server, FIELDS[wrong])
    assert WORDS[wrong] in words


@pytest.mark.parametrize("cut", [1, 2, 50, -1])
def test_half_an_upload_over_grpc(server, cut):
    call = InferenceCall("r1", "", Observation(images={"main_images": IMAGE}))
    with server.client() as client, pytest.raises(grpc.RpcError) as refused:
        client.raw(encode_request(call)[:cut])
    assert refused.value.code() is Code.INVALID_ARGUMENT
    assert "the message ends within" in refused.value.details()


def test_half_a_message_over_http(server):
    body = pack({"observation": {"main_images": IMAGE[None]}})
    with server.http() as client:
        response = client.post(ACTIONS, content=body[:-9], headers=MSGPACK)
    assert response.status_code == 400
    assert "the message ends" in response.json()["error"]["message"]


def test_half_an_upload_over_http_is_given_up_when_its_sender_goes(server):
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST {ACTIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n"
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode() + b"half")
    # What comes next is answered, which the fixture checks.


def test_half_a_frame_over_openpi(server):
    with OpenpiConnection(server.url) as robot:
        robot.send(pack({"observation/main_images": IMAGE})[:-5])
        assert "the message ends" in robot.answer()


def test_half_an_upload_over_openpi_is_given_up_when_its_sender_goes(server):
    with OpenpiConnection(server.url) as robot:
        whole = robot.frame(pack({"observation/main_images": IMAGE}))
        robot.write(whole[: len(whole) // 2])


def test_a_text_over_openpi(server):
    with OpenpiConnection(server.url) as robot:
        robot.send("{}")
        assert "send MessagePack as a binary frame" in robot.answer()


@pytest.mark.parametrize(
    "send", [lambda robot: robot.send(pack([1])), lambda robot: robot.send(b"")]
)
def test_what_is_no_observation_over_openpi(server, send: Callable[[OpenpiConnection], None]):
    with OpenpiConnection(server.url) as robot:
        send(robot)
        assert "the " in robot.answer()


def test_another_media_type_over_http(server):
    with server.http() as client:
        response = client.post(ACTIONS, json={})
    assert response.status_code == 415
    assert "send application/msgpack" in response.json()["error"]["message"]


def test_another_method_over_http(server):
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
    connection.request("GET", ACTIONS)
    answer = connection.getresponse()
    assert answer.status == 405
    answer.read()
    connection.close()


def test_a_batch_that_is_too_large(server):
    call = {"observation": {"states": np.zeros((9, 4), np.float32)}}
    with server.http() as client:
        response = client.post(ACTIONS, content=pack(call), headers=MSGPACK)
    assert response.status_code == 400
    assert "a batch of 9 rows; at most 8 are taken" in response.json()["error"]["message"]


def test_a_message_within_the_limit_of_robots_may_be_over_that_of_other_routes(server):
    call = {"observation": {"main_images": np.zeros((1, 30, 30, 3), np.uint8)}}
    with server.http() as client:
        response = client.post(ACTIONS, content=pack(call), headers=MSGPACK)
        assert response.status_code == 200, response.text
        assert unpack(response.content)["actions"].shape == (1, 5, 3)
        assert client.post("/infer", content=b" " * 2000).status_code == 413
