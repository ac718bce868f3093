"""vLLM's names for sleep, pause and weights."""

import socket

import pytest
import torch

from tests.server.rl.asking import ENDLESS, LONG, PROMPT, abort_all, ids, memory, post
from tests.server.rl.models import serving, weights_of
from tests.server.rl.trainer_process import Trainer
from tests.server.test_control import Streamed, load, until, whole

ALL = ["cuda_graph", "kv_cache", "weights"]


def is_sleeping(client) -> bool:
    return client.get("/is_sleeping").json()["is_sleeping"]


def is_paused(client) -> bool:
    return client.get("/is_paused").json()["is_paused"]


def test_sleep_and_wake_up_by_query(client):
    before = ids(client)
    assert not is_sleeping(client)
    for _ in range(2):
        assert client.post("/sleep?level=1").json() == {"status": "sleeping", "asleep": ALL}
    assert is_sleeping(client) and is_paused(client)
    assert client.post("/generate", json={"input_ids": PROMPT}).status_code == 503
    woken = client.post("/wake_up?tags=weights").json()
    assert (woken["status"], woken["asleep"]) == ("sleeping", ["cuda_graph", "kv_cache"])
    woken = client.post("/wake_up?tags=kv_cache").json()
    assert (woken["status"], woken["asleep"]) == ("awake", [])
    assert not is_sleeping(client) and not is_paused(client)
    assert ids(client) == before
    assert client.post("/wake_up").json()["status"] == "awake"


def test_sleep_and_wake_up_by_body_as_skyrl_sends_them(client):
    post(client, "/sleep", {"level": 2, "tags": ["kv_cache"]})
    assert memory(client)["asleep"] == ["cuda_graph", "kv_cache"]
    post(client, "/sleep", {"level": 2})
    assert memory(client)["asleep"] == ALL
    post(client, "/wake_up", {"tags": ["weights"]})
    post(client, "/wake_up", {"tags": ["kv_cache"]})
    ids(client)


def test_level_1_keeps_the_weights_of_a_trainer_and_level_2_does_not(client, second_dir):
    post(client, "/update_weights", {"weight_dir": str(second_dir)})
    trained = ids(client)
    client.post("/sleep?level=1")
    assert memory(client)["asleep"] == ["cuda_graph", "kv_cache"]
    client.post("/wake_up")
    assert ids(client) == trained
    client.post("/sleep?level=2")
    assert memory(client)["asleep"] == ALL
    assert client.post("/wake_up").json()["waiting_for_weights"]
    assert client.post("/generate", json={"input_ids": PROMPT}).status_code == 503
    post(client, "/update_weights", {"weight_dir": str(second_dir)})
    assert ids(client) == trained


def test_sleep_aborts_running_requests_unless_they_are_kept(server, client):
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS)
    client.post("/sleep")
    assert b'"type":"abort"' in stream.rest()
    stream.close()
    client.post("/wake_up")
    stream = Streamed(server, input_ids=PROMPT, sampling_params=LONG)
    client.post("/sleep?mode=keep")
    assert memory(client)["asleep"] == ALL
    client.post("/wake_up")
    assert b'"type":"length"' in stream.rest()
    stream.close()


def test_a_pause_of_the_callers_own_outlives_a_sleep(client):
    post(client, "/pause")
    client.post("/sleep")
    client.post("/wake_up")
    assert is_paused(client)
    post(client, "/resume")
    ids(client)


def test_level_0_only_pauses(client):
    client.post("/sleep?level=0")
    assert is_paused(client) and not is_sleeping(client)
    client.post("/wake_up")
    assert not is_paused(client)


def test_pause_modes(server, client, pool):
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS)
    told = client.post("/pause?mode=keep&clear_cache=false").json()
    assert told["status"] == "paused"
    held = whole(pool, server, input_ids=PROMPT, sampling_params={"max_new_tokens": 1})
    until(lambda: load(client)["num_total_reqs"] == 2)
    assert client.post("/resume").json()["status"] == "resumed"
    held.result()
    abort_all(client)
    assert b'"type":"abort"' in stream.rest()
    stream.close()
    stream = Streamed(server, input_ids=PROMPT, sampling_params=LONG)
    client.post("/pause", json={"wait_for_inflight_request": True})
    assert load(client)["num_total_reqs"] == 0
    assert is_paused(client)
    assert b'"type":"length"' in stream.rest()
    stream.close()
    client.post("/pause?mode=wait")  # nothing runs
    client.post("/resume")
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS)
    client.post("/pause")
    assert b'"type":"abort"' in stream.rest()
    stream.close()
    client.post("/resume")
    ids(client)


def test_reset_prefix_cache_says_whether_it_did(server, client):
    assert client.post("/reset_prefix_cache").json()["success"] is True
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS)
    assert post(client, "/reset_prefix_cache").json()["success"] is False
    abort_all(client)
    stream.rest()
    stream.close()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/sleep?level=3", {}, "level='3'; allowed"),
        ("/sleep?mode=later", {}, "mode='later'; allowed: abort, wait, keep"),
        ("/sleep?tags=cache", {}, "'cache' is no part"),
        ("/wake_up?tags=cache", {}, "'cache' is no part"),
        ("/pause?mode=later", {}, "mode='later'"),
        ("/pause?clear_cache=perhaps", {}, "clear_cache='perhaps'"),
        ("/update_weights", {"update_info": {"names": ["a"]}}, "over NCCL"),
        ("/update_weights", {"weight_dir": None}, "weight_dir is null"),
        ("/update_weights", {"names": ["a"]}, "shapes 0"),
        ("/init_weight_transfer_engine", {"init_info": {}}, "over NCCL"),
    ],
)
def test_what_is_refused_is_told(shared, path, body, words):
    told = shared.post(path, json=body)
    assert told.status_code == 400
    assert words in told.json()["error"]["message"]


@pytest.fixture(scope="module")
def shared(first_dir):
    with serving(first_dir) as server, server.client() as client:
        yield client


def test_world_size_and_update_lifecycle(shared, second_dir):
    assert shared.get("/get_world_size").json() == {"world_size": 1}
    assert shared.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    for path in ("/start_weight_update", "/finish_weight_update", "/finalize_weight_update"):
        assert post(shared, path).json()["status"] == "ok"


def test_tokenize_and_detokenize(shared):
    told = shared.post("/tokenize", json={"model": "policy", "prompt": "Hello"}).json()
    assert told["count"] == len(told["tokens"]) == 4
    assert told["max_model_len"] == 4096
    back = shared.post("/detokenize", json={"model": "policy", "tokens": told["tokens"]}).json()
    assert back["prompt"] == back["text"] == "Hello"
    messages = [{"role": "user", "content": "Hi"}]
    chat = shared.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    assert chat["count"] == len(chat["token_strs"]) > 2
    for body in ({}, {"prompt": "a", "messages": messages}, {"messages": []}):
        assert shared.post("/tokenize", json=body).status_code == 400
    assert shared.post("/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404


def test_slashes_of_trl(shared):
    assert shared.get("/health/").json() == {"status": "ok"}
    assert shared.get("/get_world_size/").json() == {"world_size": 1}
    assert "True" in shared.post("/reset_prefix_cache/").json()["message"]
    assert shared.post("/close_communicator/").status_code == 200
    for path in ("/init_communicator/", "/update_named_param/", "/batch_update_named_params/"):
        told = shared.post(path, json={})
        assert (told.status_code, "over NCCL" in told.text) == (400, True)


def test_weights_by_a_group_as_skyrl_asks_for_them(client, pool, second_dir):
    tensors = weights_of(second_dir)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trainer = Trainer(f"127.0.0.1:{port}", 2, "skyrl", second_dir / "model.safetensors")
    try:
        join = {
            "override_existing_receiver": True,
            "master_addr": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "skyrl",
            "backend": "gloo",
            "model_dtype_str": "float32",
        }
        joining = pool.submit(post, client, "/init_weight_update_communicator", join)
        trainer.joined()
        assert joining.result().json()["status"] == "ok"
        for name, tensor in tensors.items():  # one weight a request
            body = {"names": [name], "dtypes": [str(tensor.dtype)], "shapes": [list(tensor.shape)]}
            update = pool.submit(post, client, "/update_weights", body)
            trainer.send([name])
            trainer.sent()
            update.result()
        body = {"name": "model.norm.weight", "truncate_size": 32}
        numbers = post(client, "/get_weights_by_name", body).json()
        torch.testing.assert_close(torch.tensor(numbers), tensors["model.norm.weight"])
    finally:
        trainer.close()
