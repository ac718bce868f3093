"""Weights over HTTP: from disk, as tensors, by a group; questions about them; static servers."""

import base64
import importlib
import pickle

import pytest
import safetensors.torch
import torch

from tests.server.rl.asking import ENDLESS, GREEDY, LONG, PROMPT, answer, ids, memory, post
from tests.server.rl.models import serving, weights_of
from tests.server.test_control import Streamed, load, whole

TENSOR = "/update_weights_from_tensor"
DISK = "/update_weights_from_disk"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def second_answer(second_dir) -> list[int]:
    with serving(second_dir) as server, server.client() as client:
        return ids(client)


def as_file(tensors: dict[str, torch.Tensor]) -> str:
    return base64.b64encode(safetensors.torch.save(tensors)).decode()


def version(client) -> str:
    told = {
        client.get("/get_weight_version").json()["weight_version"],
        client.get("/model_info").json()["weight_version"],
        client.get("/server_info").json()["weight_version"],
    }
    (only,) = told
    return only


def test_from_disk(client, second_dir, second_answer):
    assert version(client) == "default"
    body = {"model_path": str(second_dir), "weight_version": "step-2"}
    told = post(client, DISK, body).json()
    assert (told["success"], told["num_paused_requests"]) == (True, 0)
    assert str(second_dir) in told["message"]
    result = answer(client)
    assert result["output_ids"] == second_answer
    assert result["meta_info"]["weight_version"] == version(client) == "step-2"
    assert result["meta_info"]["weight_versions"] == [["step-2", 8]]


def test_from_disk_knows_the_names_that_a_server_is_started_with(
    client, second_dir, second_answer, tmp_path, monkeypatch
):
    facts = tmp_path / "second_source-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: second-source\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[phalanx.checkpoints]\nsecond = second_source:make\n")
    (tmp_path / "second_source.py").write_text(
        f"from pathlib import Path\ndef make(cache, progress): return Path({str(second_dir)!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    post(client, DISK, {"model_path": "second", "weight_version": "2"})
    assert (ids(client), version(client)) == (second_answer, "2")


def test_from_disk_without_a_version_keeps_it(client, second_dir, second_answer):
    post(client, DISK, {"model_path": str(second_dir), "abort_all_request": True})
    assert (ids(client), version(client)) == (second_answer, "default")


def test_from_disk_refuses_what_does_not_fit_and_changes_nothing(client, tmp_path):
    before = ids(client)
    for path, words in ((tmp_path / "none", "none"), (tmp_path, "safetensors")):
        told = post(client, DISK, {"model_path": str(path)}, 400).json()
        assert told["success"] is False
        assert words in told["message"]
    odd = post(client, DISK, {"model_path": str(tmp_path), "load_format": "dummy"}, 400).json()
    assert "load_format='dummy'" in odd["message"]
    assert post(client, DISK, {}, 400).json()["success"] is False
    assert (ids(client), version(client)) == (before, "default")


def test_from_tensor_in_buckets_of_safetensors(client, second_dir, second_answer):
    names = sorted(weights_of(second_dir))
    tensors = weights_of(second_dir)
    for at in range(0, len(names), 8):
        bucket = {name: tensors[name] for name in names[at : at + 8]}
        last = at + 8 >= len(names)
        body = {
            "serialized_named_tensors": [as_file(bucket)],
            "load_format": "safetensors",
            "flush_cache": last,
            **({"weight_version": "7"} if last else {}),
        }
        told = post(client, TENSOR, body).json()
        assert told == {"success": True, "message": f"{len(bucket)} weights replaced."}
    assert (ids(client), version(client)) == (second_answer, "7")


@pytest.mark.parametrize("form", [dict, lambda tensors: list(tensors.items())])
def test_from_tensor_as_a_plain_pickle(client, second_dir, second_answer, form):
    data = base64.b64encode(pickle.dumps(form(weights_of(second_dir)))).decode()
    post(client, TENSOR, {"serialized_named_tensors": [data], "weight_version": 8})
    assert (ids(client), version(client)) == (second_answer, "8")


def test_tensors_by_handle_and_other_pickles_are_refused_in_words(client):
    from multiprocessing.reduction import ForkingPickler

    before = ids(client)
    by_handle = bytes(ForkingPickler.dumps([(NORM, torch.ones(32))]))
    for data, words in (
        (by_handle, "handles of another process's memory"),
        (pickle.dumps(print), "builtins.print"),
        (pickle.dumps([NORM]), "no list of (name, tensor) pairs"),
        (pickle.dumps({}), "no tensors in it"),
        (pickle.dumps(dict.fromkeys(map(str, range(50)), torch.ones(500))), "share the"),
        (b"nothing", "the pickle is refused at byte"),
    ):
        body = {"serialized_named_tensors": [base64.b64encode(data).decode()]}
        told = post(client, TENSOR, body, 400).json()
        assert words in told["message"], told
        assert not told["success"]
    for body, words in (
        ({"serialized_named_tensors": ["%"]}, "not base64"),
        ({"serialized_named_tensors": []}, "0 entries"),
        ({"serialized_named_tensors": ["aGk="], "load_format": "safetensors"}, "no safetensors"),
        ({"serialized_named_tensors": ["aGk="], "load_format": "flattened_bucket"}, "not read"),
    ):
        assert words in post(client, TENSOR, body, 400).json()["message"]
    assert ids(client) == before


def test_a_tensor_that_does_not_fit_changes_nothing(client):
    before = ids(client)
    wrong = {NORM: torch.ones(32), "model.norm.weight": torch.ones(31)}
    for tensors in (wrong, {"no.such": torch.ones(1)}):
        body = {"serialized_named_tensors": [as_file(tensors)], "load_format": "safetensors"}
        assert not post(client, TENSOR, body, 400).json()["success"]
    assert ids(client) == before


def test_an_update_waits_for_running_requests_and_new_ones_wait_for_it(
    server, client, pool, second_dir, second_answer
):
    """As in SGLang: no answer is of two versions unless generation was paused."""
    stream = Streamed(server, input_ids=PROMPT, sampling_params=LONG)
    body = {"model_path": str(second_dir), "weight_version": "2"}
    update = pool.submit(post, client, DISK, body)
    asked = [whole(pool, server, input_ids=PROMPT, sampling_params=GREEDY) for _ in range(4)]
    last = stream.rest().rsplit(b"data: ", 2)[-2]
    assert b'"weight_versions":[["default",300]]' in last
    stream.close()
    update.result()
    for one in asked:
        assert len(one.result()["meta_info"]["weight_versions"]) == 1
    assert ids(client) == second_answer


def test_abort_all_requests_ends_them_with_what_they_have(server, client, second_dir):
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS)
    body = {"model_path": str(second_dir), "abort_all_requests": True}
    post(client, DISK, body)
    assert b'"type":"abort"' in stream.rest()
    stream.close()


def test_update_weight_version_renames_and_aborts_unless_told_not_to(server, client):
    told = post(client, "/update_weight_version", {"new_version": "9"}).json()
    assert (told["success"], told["new_version"]) == (True, "9")
    assert version(client) == "9"
    stream = Streamed(server, input_ids=PROMPT, sampling_params=ENDLESS)
    body = {"new_version": "10", "abort_all_requests": False}
    post(client, "/update_weight_version", body)
    assert version(client) == "10"
    post(client, "/update_weight_version", {"new_version": "11"})
    assert b'"type":"abort"' in stream.rest()
    stream.close()


def test_a_session_lets_nobody_see_a_part_of_an_update(
    server, client, pool, second_dir, second_answer
):
    tensors = weights_of(second_dir)
    post(client, "/begin_weight_update")
    post(client, "/begin_weight_update")  # once more is the same
    asked = [whole(pool, server, input_ids=PROMPT, sampling_params=GREEDY) for _ in range(2)]
    for name, tensor in tensors.items():
        body = {"serialized_named_tensors": [as_file({name: tensor})]}
        post(client, TENSOR, {**body, "load_format": "safetensors"})
    assert load(client)["num_total_reqs"] == 0
    post(client, "/post_process_weights", {"post_process_quantization": True})
    assert post(client, "/end_weight_update", {"weight_version": "3"}).json()["success"]
    for one in asked:
        assert one.result()["output_ids"] == second_answer
    assert version(client) == "3"
    told = post(client, "/end_weight_update").json()
    assert (told["success"], told["message"]) == (True, "No update had begun.")


def test_released_weights_of_a_trained_model_are_awaited(client, first_dir, second_dir):
    """They were lost with their memory: nothing is computed until all of them have come again."""
    post(client, DISK, {"model_path": str(second_dir)})
    before = ids(client)
    post(client, "/release_memory_occupation")
    refused = post(client, DISK, {"model_path": str(second_dir)}, 400).json()
    assert "given back" in refused["message"]
    post(client, "/resume_memory_occupation", {"tags": ["weights"]})
    post(client, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert memory(client)["waiting_for_weights"]
    waiting = client.post("/generate", json={"input_ids": PROMPT})
    assert (waiting.status_code, "waits for weights" in waiting.text) == (503, True)
    assert client.get("/ready").text == "no weights\n"
    tensors = weights_of(second_dir)
    halves = sorted(tensors)[:3], sorted(tensors)[3:]
    for names in halves:
        assert memory(client)["waiting_for_weights"]
        body = {"serialized_named_tensors": [as_file({name: tensors[name] for name in names})]}
        post(client, TENSOR, {**body, "load_format": "safetensors"})
    assert not memory(client)["waiting_for_weights"]
    assert ids(client) == before


def test_numbers_by_name_are_rows_as_sglang_gives_them(client, first_dir):
    tensors = weights_of(first_dir)
    for method in ("GET", "POST"):
        body = {"name": EMBEDDING, "truncate_size": 3}
        rows = client.request(method, "/get_weights_by_name", json=body).json()
        torch.testing.assert_close(torch.tensor(rows), tensors[EMBEDDING][:3])
    flat = post(client, "/get_weights_by_name", {"name": NORM, "truncate_size": 5}).json()
    torch.testing.assert_close(torch.tensor(flat), tensors[NORM][:5])
    unknown = post(client, "/get_weights_by_name", {"name": "no.such"}, 400)
    assert "no.such" in unknown.json()["error"]["message"]
    post(client, "/get_weights_by_name", {"name": NORM, "truncate_size": 0}, 400)


def test_weights_checker(client, second_dir):
    first = post(client, "/weights_checker").json()
    assert first["success"]
    post(client, "/weights_checker", {"action": "snapshot"})
    assert post(client, "/weights_checker", {"action": "compare"}).json()["success"]
    post(client, "/weights_checker", {"action": "reset_tensors"})
    told = post(client, "/weights_checker", {"action": "compare"}, 400).json()
    assert not told["success"]
    assert EMBEDDING in told["payload"]["differing"]
    post(client, DISK, {"model_path": str(second_dir)})
    second = post(client, "/weights_checker", {"action": "checksum"}).json()
    assert second["payload"]["checksum"] != first["payload"]["checksum"]
    assert "action" in post(client, "/weights_checker", {"action": "look"}, 400).json()["message"]


STATIC = [
    (DISK, {"model_path": "/anywhere"}),
    (TENSOR, {"serialized_named_tensors": ["aGk="]}),
    ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}),
    ("/update_weights_from_ipc", {"zmq_handles": {}}),
    (
        "/init_weights_update_group",
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
    ),
    ("/update_weight_version", {"new_version": "2"}),
    ("/begin_weight_update", {}),
    ("/end_weight_update", {"weight_version": "2"}),
    ("/post_process_weights", {}),
    ("/weights_checker", {"action": "reset_tensors"}),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/anywhere"}),
    ("/load_lora_adapter_from_tensors", {"lora_name": "a"}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/anywhere"}),
    ("/update_weights", {"weight_dir": "/anywhere"}),
    ("/update_weights", {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}),
    ("/start_weight_update", {}),
    ("/init_weight_transfer_engine", {"init_info": {}}),
    (
        "/init_weight_update_communicator",
        {"master_addr": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
    ),
    ("/init_communicator/", {"host": "127.0.0.1", "port": 1, "world_size": 2}),
    ("/update_named_param/", {"name": "a", "dtype": "float32", "shape": [1]}),
]


def test_i96_a_static_server_refuses_every_update(first_dir):
    with serving(first_dir, server={"weight_source": "static"}) as server:
        with server.client() as client:
            before = ids(client)
            for path, body in STATIC:
                told = post(client, path, body, 400).json()
                message = told.get("message") or told["error"]["message"]
                assert "weight_source=static" in message, path
            assert (ids(client), version(client)) == (before, "default")
            assert client.get("/server_info").json()["weight_source"] == "static"
            # Questions change nothing.
            post(client, "/weights_checker")
            post(client, "/get_weights_by_name", {"name": NORM})
            post(client, "/destroy_weights_update_group")


def test_lora_ipc_and_sending_weights_are_refused_in_words(client):
    for path, words in (
        ("/load_lora_adapter", "merge the adapter"),
        ("/unload_lora_adapter", "merge the adapter"),
        ("/update_weights_from_ipc", "handles"),
        ("/send_weights_to_remote_instance", "does not send"),
    ):
        told = post(client, path, {}, 400).json()
        assert (told["success"], words in told["message"]) == (False, True)


def test_a_word_that_is_none_is_told_the_words(client):
    told = post(client, "/weights_checker", {"action": "sum"}, 400).json()
    assert "allowed: snapshot, compare, checksum, reset_tensors" in told["message"]
    told = post(client, "/pause_generation", {"mode": "stop"}, 400).json()
    assert "allowed: abort, retract, in_place" in told["message"]


def test_bodies_that_bring_weights_have_a_limit_of_their_own(first_dir):
    server = {"max_request_bytes": 2000, "max_weights_bytes": 20_000}
    with serving(first_dir, server=server) as running, running.client() as client:
        body = {
            "serialized_named_tensors": [as_file({NORM: torch.ones(32)})],
            "load_format": "safetensors",
            "padding": "x" * 4000,
        }
        post(client, TENSOR, body)
        refused = post(client, TENSOR, {**body, "padding": "x" * 20_000}, 413)
        assert "max_weights_bytes=20000" in refused.json()["message"]


def test_a_static_server_reads_no_more_of_weights_than_of_anything(first_dir):
    server = {"weight_source": "static", "max_request_bytes": 2000}
    with serving(first_dir, server=server) as running, running.client() as client:
        refused = post(client, TENSOR, {"serialized_named_tensors": ["x" * 4000]}, 413)
        assert "max_request_bytes=2000" in refused.json()["message"]
