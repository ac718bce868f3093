"""The server that behaves as SGLang: its requests and answers (spec 3.2 to 3.5, and 3.7)."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.roles.launching.sglang_talk import generated, loads, running, talked, until_one


def test_generate_answers_as_sglang():
    async def test(client: httpx.AsyncClient) -> None:
        answer = await generated(
            client,
            rid="mine",
            input_ids=[5, 6, 7],
            sampling_params={"max_new_tokens": 2},
            return_logprob=True,
            logprob_start_len=1,
            top_logprobs_num=2,
            token_ids_logprob=[9],
            return_prompt_token_ids=True,
        )
        meta = answer["meta_info"]
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "length", "length": 2}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 2)
        assert meta["weight_version"] == "default"
        assert answer["prompt_token_ids"] == [5, 6, 7]
        assert [one[1] for one in meta["input_token_logprobs"]] == [6, 7]
        assert meta["input_token_logprobs"][0][0] is None
        assert [one[1] for one in meta["output_token_logprobs"]] == answer["output_ids"]
        assert len(meta["output_top_logprobs"][0]) == 2
        assert meta["output_token_ids_logprobs"][0][0][1] == 9
        assert len(answer["text"]) == 2

    talked(test)


def test_the_same_weights_answer_the_same_and_score_as_they_generate():
    async def test(client: httpx.AsyncClient) -> None:
        sampling = {"max_new_tokens": 3}
        one = await generated(client, text="a", sampling_params=sampling, return_logprob=True)
        assert (await generated(client, text="a", sampling_params=sampling))["text"] == one["text"]
        scored = await generated(
            client,
            input_ids=[ord("a"), *one["output_ids"]],
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        meta = scored["meta_info"]
        assert meta["input_token_logprobs"][1:] == one["meta_info"]["output_token_logprobs"]
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert scored["output_ids"] == []

    talked(test)


def test_batches_and_several_answers_are_lists():
    async def test(client: httpx.AsyncClient) -> None:
        sampling = {"max_new_tokens": 1, "n": 2}
        answers = await generated(client, text=["a", "b"], sampling_params=sampling)
        assert len(answers) == 4
        assert isinstance(await generated(client, text="a", sampling_params=sampling), list)

    talked(test)


def test_a_stream_is_cumulative_and_done():
    async def test(client: httpx.AsyncClient) -> None:
        body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}, "stream": True}
        lines = (await client.post("/generate", json=body)).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line[6:]) for line in lines[:-2]]
        for index in range(2):
            mine = [chunk for chunk in chunks if chunk["index"] == index]
            assert [len(chunk["output_ids"]) for chunk in mine] == [1, 2]
            assert mine[0]["meta_info"]["finish_reason"] is None
            assert mine[1]["meta_info"]["finish_reason"]["type"] == "length"

    talked(test)


def test_chat_and_completions():
    async def test(client: httpx.AsyncClient) -> None:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        answer = (await client.post("/v1/chat/completions", json=chat)).json()
        text = answer["choices"][0]["message"]["content"]
        assert len(text) == 2 and answer["usage"]["completion_tokens"] == 2
        streamed = await client.post("/v1/chat/completions", json={**chat, "stream": True})
        lines = [line[6:] for line in streamed.text.split("\n\n") if line]
        deltas = [json.loads(line)["choices"][0]["delta"]["content"] for line in lines[:-1]]
        assert "".join(deltas) == text and lines[-1] == "[DONE]"
        completion = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert len(completion.json()["choices"][0]["text"]) == 3

    talked(test)


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b"{}",
        b'{"text": 3}',
        b'{"text": "a", "input_ids": [1]}',
        b'{"text": "a", "sampling_params": {"temperature": -1}}',
        b'{"text": "a", "logprob_start_len": 9}',
    ],
)
def test_bad_requests_are_refused(body):
    async def test(client: httpx.AsyncClient) -> None:
        response = await client.post("/generate", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]

    talked(test)


def test_an_aborted_request_keeps_its_tokens_and_the_abort_says_nothing():
    async def test(client: httpx.AsyncClient) -> None:
        async with running(client, "long-1") as task:
            response = await client.post("/abort_request", json={"rid": "long"})
            assert (response.status_code, response.content) == (200, b"")
            answer = await task
        reason = answer["meta_info"]["finish_reason"]
        assert reason["type"] == "abort" and reason["status_code"] is None
        assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"]

    talked(test)


def test_an_abort_of_nobody_aborts_nobody():
    async def test(client: httpx.AsyncClient) -> None:
        async with running(client) as task:
            await client.post("/abort_request", json={"rid": ""})
            await client.post("/abort_request", json={"rid": "other"})
            assert (await loads(client))["num_running_reqs"] == 1
            assert not task.done()

    talked(test)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flush_is_refused_while_a_request_runs(method):
    async def test(client: httpx.AsyncClient) -> None:
        async with running(client) as task:
            assert (await client.request(method, "/flush_cache")).status_code == 400
            await client.post("/abort_request", json={"abort_all": True})
            await task
            assert (await client.request(method, "/flush_cache")).status_code == 200

    talked(test)


def test_a_pause_aborts_and_holds_what_comes():
    async def test(client: httpx.AsyncClient) -> None:
        async with running(client) as task:
            paused = await client.post("/pause_generation", json={})
            message = {"message": "Generation paused successfully.", "status": "ok"}
            assert (paused.status_code, paused.json()) == (200, message)
            assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
        held = asyncio.create_task(
            generated(client, text="b", sampling_params={"max_new_tokens": 1})
        )
        await until_one(client, "num_waiting_reqs")
        assert (await client.post("/flush_cache")).status_code == 400
        await client.post("/continue_generation", json={})
        assert (await held)["meta_info"]["completion_tokens"] == 1

    talked(test)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_may_keep_what_runs(mode):
    async def test(client: httpx.AsyncClient) -> None:
        async with running(client) as task:
            await client.post("/pause_generation", json={"mode": mode})
            assert not task.done()
            is_running = (await loads(client))["num_running_reqs"] == 1
            assert is_running == (mode == "in_place")
            await client.post("/continue_generation")
            await client.post("/abort_request", json={"abort_all": True})
            await task

    talked(test)


def test_groups_versions_adapters_and_checks():
    async def test(client: httpx.AsyncClient) -> None:
        async def ask(path: str, **body: object) -> bool:
            response = await client.post(path, json=body)
            answer = response.json()
            assert response.status_code == (200 if answer["success"] else 400)
            assert answer["message"]
            return answer["success"]

        names = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}
        assert not await ask("/update_weights_from_distributed", **names)
        assert await ask("/init_weights_update_group", group_name="g")
        assert await ask("/update_weights_from_distributed", **names, weight_version="5")
        assert (await client.get("/model_info")).json()["weight_version"] == "5"
        assert await ask("/destroy_weights_update_group", group_name="g")
        assert not await ask("/destroy_weights_update_group", group_name="g")
        assert await ask("/update_weights_from_tensor", serialized_named_tensors=["AA=="])
        assert await ask("/update_weight_version", new_version="6")
        assert await ask("/weights_checker", action="snapshot")
        assert await ask("/weights_checker", action="compare")
        assert await ask("/weights_checker", action="reset_tensors")
        assert not await ask("/weights_checker", action="compare")
        assert await ask("/load_lora_adapter", lora_name="a", lora_path="/a")
        assert await ask("/unload_lora_adapter", lora_name="a")
        assert not await ask("/unload_lora_adapter", lora_name="a")
        numbers = await client.post("/get_weights_by_name", json={"name": "w", "truncate_size": 4})
        assert len(numbers.json()[0]) == 4

    talked(test)


def test_health_and_information():
    async def test(client: httpx.AsyncClient) -> None:
        for path in ("/health", "/health_generate", "/ready", "/ping"):
            assert (await client.get(path)).status_code == 200
        info = (await client.get("/get_model_info")).json()
        assert (info["served_model_name"], info["weight_version"]) == ("tiny", "default")
        server = (await client.get("/get_server_info")).json()
        assert server["version"] == "0.5.23" and "memory" not in server
        assert (await client.get("/get_weight_version")).status_code == 404
        models = (await client.get("/v1/models")).json()
        assert models["object"] == "list" and models["data"][0]["id"] == "tiny"

    talked(test)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_worker_of_a_pair_wants_a_room(mode):
    async def test(client: httpx.AsyncClient) -> None:
        response = await client.post("/generate", json={"text": "a"})
        assert response.status_code == 400 and "bootstrap room" in response.text
        sampling = {"max_new_tokens": 3}
        answer = await generated(client, text="a", sampling_params=sampling, bootstrap_room=7)
        assert len(answer["output_ids"]) == (1 if mode == "prefill" else 3)

    talked(test, disaggregation_mode=mode)
