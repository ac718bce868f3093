"""Servers on simulated devices: what each tag holds, what a wake and an update do for want of room."""

import base64
from collections.abc import Iterator

import pytest
import safetensors.torch

from phalanx.device_ledger import DeviceLedger, SimulatedDevice
from phalanx.errors import SimulatedOutOfMemoryError
from phalanx.schema.deployment import DeploymentConfig
from tests.server.rl.asking import ids, memory, post
from tests.server.rl.models import POOL_TOKENS, serving, weights_of

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
BUDGET = 1 << 24
PAGE = 16
KV_BYTES = 2 * 2 * (POOL_TOKENS + PAGE) * 2 * 8 * 4
"""Layers, keys and values, tokens with a page for padding, heads, their size, float32."""


@pytest.fixture
def devices(tmp_path, monkeypatch) -> DeviceLedger:
    ledger = DeviceLedger.create(tmp_path / "devices", 2, BUDGET)
    monkeypatch.setenv("PHALANX_SIMULATED_DEVICES", f"{ledger.path}:1,0@rollout/policy/0")
    return ledger


@pytest.fixture
def other(devices) -> Iterator[SimulatedDevice]:
    """Somebody else on the server's device."""
    neighbour = SimulatedDevice(devices, 1, "teacher/big/0")
    yield neighbour
    neighbour.give("weights")


def held(devices: DeviceLedger) -> dict[str, int]:
    """Of the server, which holds nothing elsewhere."""
    own = [one for one in devices.held() if one.owner == "rollout/policy/0"]
    assert {one.device for one in own} <= {1}
    return {one.tag: one.num_bytes for one in own}


def embedding_bytes(directory) -> int:
    return weights_of(directory)["model.embed_tokens.weight"].numel() * 4


def weight_bytes(directory) -> int:
    """Each once, but the embedding, which the head has packed in another form as well."""
    each_once = sum(tensor.numel() * 4 for tensor in weights_of(directory).values())
    return each_once + embedding_bytes(directory)


def update_body(directory) -> tuple[dict, int]:
    tensors = weights_of(directory)
    told = base64.b64encode(safetensors.torch.save(tensors)).decode()
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return {"serialized_named_tensors": [told], "load_format": "safetensors"}, num_bytes


def test_each_tag_holds_the_size_of_its_tensors_until_it_sleeps(devices, first_dir):
    whole = {"weights": weight_bytes(first_dir), "kv_cache": KV_BYTES}
    with serving(first_dir) as server, server.client() as client:
        before = ids(client)
        assert held(devices) == whole
        post(client, RELEASE, {"tags": ["kv_cache"]})
        assert held(devices) == {"weights": whole["weights"]}
        post(client, RELEASE)
        assert held(devices) == {}
        post(client, RESUME, {"tags": ["weights"]})
        assert held(devices) == {"weights": whole["weights"]}
        post(client, RESUME)
        assert held(devices) == whole and ids(client) == before
    assert held(devices) == {}
    assert devices.peaks() == (0, sum(whole.values()))


def test_packed_copies_count(devices, first_dir):
    with serving(first_dir, quantization="int8") as server, server.client() as client:
        ids(client)
        # The embedding is as it was; of matrices a fourth is left, and their scales.
        matrices = weight_bytes(first_dir) - embedding_bytes(first_dir)
        assert matrices / 4 < held(devices)["weights"] - embedding_bytes(first_dir) < matrices / 2


def test_complaint_two_roles_resident_together_fail_loudly(devices, other, first_dir):
    with serving(first_dir) as server, server.client() as client:
        before = ids(client)
        post(client, RELEASE)
        other.take("weights", BUDGET - KV_BYTES)
        for _ in range(2):
            refused = post(client, RESUME, status=507)
            assert "rollout/policy/0" in refused.text
            assert "is out of memory" in refused.text and "teacher/big/0" in refused.text
            assert held(devices) == {}
            assert memory(client)["asleep"] == ["cuda_graph", "kv_cache", "weights"]
        # A part of it fits.
        post(client, RESUME, {"tags": ["kv_cache"]})
        assert held(devices) == {"kv_cache": KV_BYTES}
        assert client.post("/generate", json={"input_ids": [5]}).status_code == 503
        other.give("weights")
        post(client, RESUME)
        assert ids(client) == before


def test_a_server_that_does_not_fit_does_not_start(devices, other, first_dir):
    other.take("weights", BUDGET - KV_BYTES)
    with (
        pytest.raises(
            SimulatedOutOfMemoryError, match=r"tried to take .* for kv_cache.*teacher/big"
        ),
        serving(first_dir),
    ):
        pass
    assert held(devices) == {}


def test_an_update_needs_room_for_what_comes(devices, other, first_dir, second_dir):
    body, num_bytes = update_body(second_dir)
    whole = {"weights": weight_bytes(first_dir), "kv_cache": KV_BYTES}
    with serving(first_dir) as server, server.client() as client:
        before = ids(client)
        other.take("weights", BUDGET - sum(whole.values()) - num_bytes + 1)
        refused = post(client, "/update_weights_from_tensor", body, 507)
        assert "weight_update" in refused.text
        assert ids(client) == before and held(devices) == whole
        other.take("weights", BUDGET - sum(whole.values()) - num_bytes)
        post(client, "/update_weights_from_tensor", body)
        assert ids(client) != before and held(devices) == whole
        assert devices.peaks()[1] == BUDGET
        # Lost with its memory, whose room is kept for the next ones.
        post(client, RELEASE)
        post(client, RESUME)
        assert held(devices) == whole and memory(client)["waiting_for_weights"]


@pytest.mark.long
@pytest.mark.parametrize(
    "deployment", [DeploymentConfig(replica_count=2), None], ids=["replicas", "ranks"]
)
def test_replicas_and_ranks_spread_over_the_devices(devices, first_dir, deployment):
    ranks = 2 if deployment is None else 1
    with serving(first_dir, deployment=deployment, tp=ranks) as server, server.client() as client:
        ids(client)
        found = {(one.device, one.tag): one.num_bytes for one in devices.held()}
        assert len({one.pid for one in devices.held()}) == 2
        assert found[0, "kv_cache"] == found[1, "kv_cache"] == KV_BYTES // ranks
        assert found[0, "weights"] == found[1, "weights"]
        post(client, RELEASE)
        assert devices.held() == ()
        teacher = SimulatedDevice(devices, 0, "teacher/big/0")
        with teacher.holding("weights", BUDGET - found[0, "weights"]):
            # One of them has room, and none wakes.
            refused = post(client, RESUME, status=507)
            assert "simulated device 0 is out of memory" in refused.text
        post(client, RELEASE)
        assert devices.held() == ()
        post(client, RESUME)
        assert {(one.device, one.tag): one.num_bytes for one in devices.held()} == found
