"""pi0.5 behind a policy server, as `examples/pi05.yaml` describes it: LeRobot's own actions come
back over each protocol."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from phalanx import Engine
from phalanx.cli.serve import load_config
from phalanx.cli.serve_plan import plan
from phalanx.schema.observation import Observation
from tests.server.policy.openpi_client import OpenpiConnection
from tests.server.policy.running import RunningPolicy

ROOT = Path(__file__).parents[3]
FIXTURE = ROOT / "tests" / "fixtures" / "policies" / "pi05_micro_f32"
TASKS = ("pick up the red cube and put it in the box", "fold")


@pytest.fixture(scope="module")
def io() -> dict[str, np.ndarray]:
    return load_file(FIXTURE / "io.safetensors")


@pytest.fixture(scope="module")
def server():
    overrides = {"engine.num_threads": 1}
    made = plan(*load_config(ROOT / "examples" / "pi05.yaml", overrides), prepare=True)
    assert made.policy is not None
    config = replace(made.server, port=0, http_port=0)
    running = RunningPolicy(
        lambda: Engine(made.engine, deployment=made.placement.deployment), made.policy, config
    )
    running.ready.result()
    yield running
    running.stop()
    running.join()


def near(actions: np.ndarray, reference: np.ndarray) -> bool:
    return bool((np.abs(actions - reference) <= 5e-6 * np.maximum(1, np.abs(reference))).all())


def test_the_server_says_what_a_robot_must_send(server):
    assert str(server.ready.result()).endswith("cameras: front, wrist; state: 8; actions: 10 x 7")


def test_a_batch_over_grpc_gets_lerobots_actions(server, io):
    observation = Observation(
        images={"front": io["in.front_u8"], "wrist": io["in.wrist_u8"]},
        state=io["in.state"],
        instructions=TASKS,
        batched=True,
        inputs={"noise": io["in.noise"]},
    )
    with server.client() as client:
        answer = client.infer(observation, model="pi05")
    assert near(answer.actions.values, io["out.actions"])


@pytest.mark.parametrize("row", [0, 1])
def test_a_robot_over_openpi_gets_lerobots_actions(server, io, row):
    with OpenpiConnection(server.url) as robot:
        answer = robot.infer(
            {
                "observation/front": io["in.front_u8"][row],
                "observation/wrist": io["in.wrist_u8"][row],
                "observation/state": io["in.state"][row],
                "prompt": TASKS[row],
                "noise": io["in.noise"][row],
            }
        )
    assert near(answer["actions"], io["out.actions"][row])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"images": {"top": np.zeros((28, 28, 3), np.uint8)}}, "top"),
        ({"state": np.zeros(6, np.float32)}, "6"),
        ({"parameters": {"num_stepz": 3}}, "num_stepz"),
        ({"inputs": {"pixels": np.zeros(3, np.float32)}}, "pixels"),
    ],
)
def test_what_pi05_cannot_use_is_refused_in_words(server, io, fields, words):
    values = {
        "images": {"front": io["in.front_u8"][0]},
        "state": io["in.state"][0],
        "instructions": TASKS[:1],
        **fields,
    }
    with server.client() as client:
        code, details = client.refused(Observation(**values), model="pi05")
    assert code.name == "INVALID_ARGUMENT"
    assert words in details


def test_a_policy_asleep_refuses_robots_and_wakes_to_the_same_actions(server, io):
    observation = Observation(
        images={"front": io["in.front_u8"][0], "wrist": io["in.wrist_u8"][0]},
        state=io["in.state"][0],
        instructions=TASKS[:1],
        inputs={"noise": io["in.noise"][0]},
    )
    robot = {
        "observation/front": io["in.front_u8"][0],
        "observation/wrist": io["in.wrist_u8"][0],
        "observation/state": io["in.state"][0],
        "prompt": TASKS[0],
    }
    with server.client() as client, httpx.Client(base_url=server.url) as http:
        before = client.infer(observation).actions.values
        for _ in range(2):
            assert http.post("/release_memory_occupation", json={}).content == b"null"
        error = client.future(observation).exception()
        assert error.code().name == "UNAVAILABLE" and "engine is asleep" in error.details()
        assert ("phalanx-not-started", "1") in error.trailing_metadata()
        assert not client.healthy() and http.get("/healthz").status_code == 503
        with OpenpiConnection(server.url) as connection:
            assert "engine is asleep" in connection.infer(robot)
            for _ in range(2):
                assert http.post("/resume_memory_occupation", json={}).content == b"null"
            assert np.isfinite(connection.infer(robot)["actions"]).all()
        assert client.healthy() and http.get("/healthz").status_code == 200
        assert np.array_equal(client.infer(observation).actions.values, before)
