"""Two replicas in workers behind one server: every operation reaches both."""

import base64
import socket

import pytest
import safetensors.torch

from phalanx.schema.deployment import DeploymentConfig
from tests.server.rl.asking import answer, ids, memory, post
from tests.server.rl.models import serving, weights_of, write_llama
from tests.server.rl.trainer_process import Trainer

pytestmark = pytest.mark.long


def both(client, **fields: object) -> list[list[int]]:
    """What each replica answers: requests that follow one another take turns."""
    return [ids(client, **fields) for _ in range(2)]


def test_two_replicas_sleep_wake_and_are_updated_alike(tmp_path, pool):
    sizes = {"hidden_size": 256, "intermediate_size": 1024}
    first, second = (write_llama(tmp_path / str(seed), seed, **sizes) for seed in (1, 2))
    num_bytes = (first / "model.safetensors").stat().st_size
    tensors = weights_of(second)
    deployment = DeploymentConfig(replica_count=2)
    with serving(first, deployment=deployment) as server, server.client() as client:
        assert client.get("/get_world_size").json() == {"world_size": 2}
        old = both(client)
        assert old[0] == old[1]
        awake = memory(client)["rss_bytes"]
        post(client, "/release_memory_occupation")
        assert awake - memory(client)["rss_bytes"] > 1.2 * num_bytes
        assert client.post("/generate", json={"input_ids": [5]}).status_code == 503
        post(client, "/resume_memory_occupation")
        assert both(client) == old
        body = {
            "serialized_named_tensors": [
                base64.b64encode(safetensors.torch.save(tensors)).decode()
            ],
            "load_format": "safetensors",
            "weight_version": "2",
        }
        post(client, "/update_weights_from_tensor", body)
        new = both(client)
        assert new[0] == new[1] != old[0]
        assert answer(client)["meta_info"]["weight_version"] == "2"
        reports = post(client, "/weights_checker").json()["payload"]["checksums"]
        assert len(reports) == 2 and len(set(reports)) == 1
        body = {"model_path": str(first), "weight_version": "3"}
        post(client, "/update_weights_from_disk", body)
        assert both(client) == old
        _by_group(client, pool, second, tensors)
        assert both(client) == new


def _by_group(client, pool, directory, tensors) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trainer = Trainer(f"127.0.0.1:{port}", 3, "rl", directory / "model.safetensors")
    try:
        join = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "rl",
            "backend": "gloo",
        }
        joining = pool.submit(post, client, "/init_weights_update_group", join)
        trainer.joined()
        joining.result()
        names = list(tensors)
        body = {
            "names": names,
            "dtypes": [str(tensors[one].dtype) for one in names],
            "shapes": [list(tensors[one].shape) for one in names],
            "group_name": "rl",
        }
        update = pool.submit(post, client, "/update_weights_from_distributed", body)
        trainer.send(names)
        trainer.sent()
        update.result()
    finally:
        trainer.close()
