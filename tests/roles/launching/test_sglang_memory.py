"""The server that behaves as SGLang: memory and weights (spec 3.6, 3.7), and what ends its process."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.roles.launching.sglang_talk import generated, running, talked, until_one

TAGS = ["kv_cache", "weights", "cuda_graph"]


@pytest.mark.parametrize("tags", [None, [], TAGS])
def test_memory_is_given_back_and_taken_again(tags):
    async def test(client: httpx.AsyncClient) -> None:
        for path in ("/release_memory_occupation", "/resume_memory_occupation"):
            response = await client.post(path, json={"tags": tags})
            assert (response.status_code, response.content) == (200, b"null")

    talked(test)


def test_complaint_sglang_24119_a_release_while_a_request_runs_ends_the_process():
    async def test(client: httpx.AsyncClient) -> None:
        async with running(client):
            await client.post("/release_memory_occupation", json={"tags": TAGS})

    talked(test, crash="AssertionError")


def test_a_release_ends_it_while_one_waits_unless_it_is_paused():
    async def paused(client: httpx.AsyncClient) -> None:
        await client.post("/pause_generation")
        held = asyncio.create_task(generated(client, text="b"))
        await until_one(client, "num_waiting_reqs")
        await client.post("/release_memory_occupation", json={"tags": ["kv_cache"]})
        await client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
        await client.post("/continue_generation")
        await held

    talked(paused)

    async def in_place(client: httpx.AsyncClient) -> None:
        async with running(client):
            await client.post("/pause_generation", json={"mode": "in_place"})
            await client.post("/release_memory_occupation")

    talked(in_place, crash="AssertionError")


def test_complaint_sglang_24123_a_resume_of_what_was_not_released_ends_the_process():
    async def test(client: httpx.AsyncClient) -> None:
        await client.post("/release_memory_occupation", json={"tags": ["weights"]})
        await client.post("/resume_memory_occupation", json={"tags": ["weights"]})
        await client.post("/resume_memory_occupation", json={"tags": ["weights"]})

    talked(test, crash="KeyError: 'weights'")


@pytest.mark.parametrize("tag", TAGS)
def test_complaint_relax_282_a_request_after_a_release_ends_the_process(tag):
    async def test(client: httpx.AsyncClient) -> None:
        await client.post("/release_memory_occupation", json={"tags": [tag]})
        await generated(client, text="a")

    talked(test, crash="illegal memory access")


def test_weights_without_a_backup_are_garbage_until_they_are_updated():
    async def test(client: httpx.AsyncClient) -> None:
        before = (await generated(client, text="a"))["text"]
        await client.post("/release_memory_occupation")
        await client.post("/resume_memory_occupation")
        assert (await generated(client, text="a"))["text"] != before
        assert (await client.get("/model_info")).json()["weight_version"] == "default"
        update = {"model_path": "tiny", "weight_version": "1"}
        assert (await client.post("/update_weights_from_disk", json=update)).json()["success"]
        answer = await generated(client, text="a")
        assert (answer["text"], answer["meta_info"]["weight_version"]) == (before, "1")

    talked(test)


@pytest.mark.parametrize("fields", [{"weights_backup": True}, {"memory_saver": False}])
def test_weights_with_a_backup_and_those_that_were_never_freed_come_back(fields):
    async def test(client: httpx.AsyncClient) -> None:
        before = (await generated(client, text="a"))["text"]
        await client.post("/release_memory_occupation")
        await client.post("/resume_memory_occupation")
        assert (await generated(client, text="a"))["text"] == before

    talked(test, **fields)


def test_an_update_waits_for_what_runs_and_holds_what_comes():
    async def test(client: httpx.AsyncClient) -> None:
        async with running(client) as task:
            body = {"model_path": "new", "weight_version": "2"}
            update = asyncio.create_task(client.post("/update_weights_from_disk", json=body))
            await asyncio.sleep(0)
            later = asyncio.create_task(generated(client, text="b"))
            assert (await client.get("/model_info")).json()["weight_version"] == "default"
            await client.post("/abort_request", json={"rid": "long"})
            assert (await task)["meta_info"]["weight_version"] in ("default", "2")
            assert (await update).status_code == 200
            assert (await later)["meta_info"]["weight_version"] == "2"

    talked(test)


def test_an_update_whose_flush_is_refused_says_no_and_is_in():
    async def test(client: httpx.AsyncClient) -> None:
        reference = await generated(client, text="a")
        async with running(client):
            await client.post("/pause_generation", json={"mode": "in_place"})
            body = {"model_path": "new", "weight_version": "2"}
            answer = await client.post("/update_weights_from_disk", json=body)
            assert answer.status_code == 400 and answer.json()["success"] is False
            await client.post("/continue_generation")
            await client.post("/abort_request", json={"abort_all": True})
        assert (await generated(client, text="a"))["text"] != reference["text"]

    talked(test)
