"""Actions of Cosmos3 as they are served: a real server process, and clients of every protocol."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from phalanx.client import PolicyClient
from phalanx.schema.observation import Observation
from phalanx.wire.msgpack_numpy import pack, unpack
from tests.caches import own_cache
from tests.models.cosmos3.served import EXAMPLES, PLAIN, behind_a_gateway, process
from tests.server.policy.openpi_client import OpenpiConnection

IMAGE = np.full((48, 64, 3), 128, np.uint8)
STATE = np.zeros(8, np.float32)
ROUNDING = 1e-4
"""A prompt that was read before is computed in other parts."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return own_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def policy(cache) -> Iterator[dict[str, str]]:
    file = str(EXAMPLES / "cosmos3_policy.yaml")
    with process(cache, "serve", file, *PLAIN, "--http-port", "0") as server:
        yield server


def test_actions_by_our_own_client(policy):
    with PolicyClient(policy["grpc"], model="cosmos3_policy") as client:
        actions = client.act({"front": IMAGE}, STATE, "pick up the cube")
        assert actions.shape == (8, 8)
        assert np.isfinite(actions).all()
        again = client.act({"front": IMAGE}, STATE, "pick up the cube", horizon=3)
        assert np.allclose(again, actions[:3], atol=ROUNDING)
        other = client.act({"front": IMAGE}, STATE, "pick up the cube", parameters={"seed": 1})
        assert not np.allclose(other, actions, atol=0.1)


@pytest.mark.long
def test_actions_through_a_gateway(cache, policy):
    with PolicyClient(policy["grpc"], model="cosmos3_policy") as client:
        expected = client.act({"front": IMAGE}, STATE, "push")
    with (
        behind_a_gateway(cache, "cosmos3_policy", policy["grpc"]) as gateway,
        PolicyClient(gateway["door"], model="cosmos3_policy") as client,
    ):
        actions = client.act({"front": IMAGE}, STATE, "push")
    assert np.allclose(actions, expected, atol=ROUNDING)


def test_actions_by_openpis_client(policy):
    with OpenpiConnection(policy["http"]) as robot:
        answer = robot.infer(
            {"observation/image": IMAGE, "observation/state": STATE, "prompt": "pick up the cube"}
        )
        assert answer["actions"].shape == (8, 8)


def over_http(policy) -> httpx.Response:
    body = {
        "model": "cosmos3_policy",
        "observation": {
            "main_images": IMAGE[None],
            "states": STATE[None],
            "task_descriptions": ["pick up the cube"],
        },
    }
    return httpx.post(
        f"{policy['http']}/v1/actions/generations",
        content=pack(body),
        headers={"content-type": "application/msgpack"},
        timeout=60,
    )


def test_actions_over_http(policy):
    answer = over_http(policy)
    assert answer.status_code == 200, answer.text
    assert unpack(answer.content)["actions"].shape == (1, 8, 8)


def test_it_gives_its_memory_back_and_takes_it_again(policy):
    before = unpack(over_http(policy).content)["actions"]
    for _ in range(2):
        assert httpx.post(f"{policy['http']}/release_memory_occupation").content == b"null"
        refused = over_http(policy)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "engine is asleep" in refused.text
    for _ in range(2):
        assert httpx.post(f"{policy['http']}/resume_memory_occupation").content == b"null"
        after = unpack(over_http(policy).content)["actions"]
        assert np.allclose(after, before, atol=ROUNDING)


def test_what_given_actions_lead_to(policy):
    seen = Observation(
        images={"front": IMAGE},
        instructions=("pick up the cube",),
        inputs={"actions": np.zeros((8, 8), np.float32)},
        parameters={"mode": "forward_dynamics"},
    )
    with PolicyClient(policy["grpc"], model="cosmos3_policy") as client:
        answer = client.infer(seen)
    assert answer.values.shape == (0, 8)
    assert answer.outputs["video_latents"].shape == (6, 3, 3, 4)


def test_what_a_policy_cannot_use_is_told(policy):
    answer = httpx.post(
        f"{policy['http']}/v1/actions/generations",
        content=pack({"model": "cosmos3_policy", "observation": {"main_images": IMAGE[None]}}),
        headers={"content-type": "application/msgpack"},
    )
    assert answer.status_code in (400, 422)
    assert "there is no state; this policy takes 8" in answer.text
