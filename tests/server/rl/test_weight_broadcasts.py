"""Weights over HTTP by a process group of a trainer's, and what remains of it when that dies."""

import socket
from pathlib import Path

import pytest

from tests.server.rl.asking import PROMPT, ids, post
from tests.server.rl.models import weights_of
from tests.server.rl.test_weight_routes import (
    NORM,
    TENSOR,
    as_file,
    second_answer,  # noqa: F401 - a fixture
    version,
)
from tests.server.rl.trainer_process import Trainer


def dies_in_a_session(client, pool, trainer: Trainer, directory: Path) -> None:
    """Requests are refused in words, and not held for ever, until somebody has sent everything."""
    route, body = "/update_weights_from_distributed", {"dtypes": ["float32"], "shapes": [[32]]}
    post(client, "/begin_weight_update")
    update = pool.submit(post, client, route, {**body, "names": [NORM], "group_name": "rl"})
    trainer.send([NORM])
    assert update.result().json()["success"]
    trainer.close()
    lost = post(client, route, {**body, "names": [NORM], "group_name": "rl"}, 400).json()
    assert "join the weight group 'rl' again" in lost["message"]
    refused = client.post("/generate", json={"input_ids": PROMPT})
    assert refused.status_code == 503
    assert "a weight update was begun and not ended" in refused.text
    assert "/end_weight_update" in client.get("/ready").text
    post(
        client,
        TENSOR,
        {"serialized_named_tensors": [as_file(weights_of(directory))]}
        | {"load_format": "safetensors"},
    )
    post(client, "/end_weight_update")


def test_weights_by_a_group_that_a_trainer_makes(client, pool, second_dir, second_answer):  # noqa: F811
    tensors = weights_of(second_dir)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trainer = Trainer(f"127.0.0.1:{port}", 2, "rl", second_dir / "model.safetensors")
    try:
        join = {
            "master_address": "127.0.0.1",
            "master_port": str(port),  # as AReaL sends it
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "rl",
        }
        refused = post(client, "/init_weights_update_group", {**join, "backend": "nccl"}, 400)
        assert "use 'gloo'" in refused.json()["message"]
        joining = pool.submit(
            post, client, "/init_weights_update_group", {**join, "backend": "gloo"}
        )
        trainer.joined()
        assert joining.result().json()["success"]
        names = list(tensors)
        for part, told in ((names[:4], None), (names[4:], "12")):
            body = {
                "names": part,
                "dtypes": [str(tensors[one].dtype) for one in part],
                "shapes": [list(tensors[one].shape) for one in part],
                "group_name": "rl",
                "weight_version": told,
            }
            update = pool.submit(post, client, "/update_weights_from_distributed", body)
            trainer.send(part)
            trainer.sent()
            assert update.result().json()["success"]
        assert (ids(client), version(client)) == (second_answer, "12")
        dies_in_a_session(client, pool, trainer, second_dir)
        assert ids(client) == second_answer
        for _ in range(2):
            left = post(client, "/destroy_weights_update_group", {"group_name": "rl"})
            assert left.json()["success"]
        body = {"name": NORM, "dtype": "float32", "shape": [32], "group_name": "rl"}
        unknown = post(client, "/update_weights_from_distributed", body, 400).json()
        assert "'rl' is not joined" in unknown["message"]
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"names": [], "dtypes": [], "shapes": []}, "names is empty"),
        ({"names": ["a"], "dtypes": [], "shapes": [[1]]}, "dtypes 0 and shapes 1"),
        ({"names": ["a"], "name": "a"}, "give names, dtypes and shapes, or"),
        ({"names": ["a"], "load_format": "flattened_bucket"}, "each weight by itself"),
        (
            {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "rl"},
            "POST /init_weights_update_group",
        ),
    ],
)
def test_lists_of_a_broadcast_that_do_not_fit(client, body, words):
    told = post(client, "/update_weights_from_distributed", body, 400).json()
    assert words in told["message"]
