"""A trainer that calls in any order, while requests come: the server stays, and its answers are right."""

import random
import threading

import pytest

from tests.server.rl.asking import ids, memory, post
from tests.server.rl.models import serving
from tests.server.rl.test_updates_under_load import likeliest

TAGS = ["weights", "kv_cache", "cuda_graph"]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def references(first_dir, second_dir):
    with (
        serving(first_dir) as first,
        serving(second_dir) as second,
        first.client() as one,
        second.client() as other,
    ):
        yield {"a": one, "b": other}


class Rollouts:
    """Clients that ask one request after another until they are told to stop."""

    def __init__(self, server, pool, num_clients: int) -> None:
        self._server, self._stop = server, threading.Event()
        self._running = [pool.submit(self._run, at) for at in range(num_clients)]

    def _run(self, at: int) -> list[tuple[list[int], dict]]:
        answers = []
        with self._server.client() as client:
            for number in range(10_000):
                if self._stop.is_set():
                    break
                prompt = [5 + at, 6, 7 + number % 200]
                sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
                body = {"input_ids": prompt, "sampling_params": sampling}
                response = client.post("/generate", json=body)
                if response.status_code == 200:
                    answers.append((prompt, response.json()))
                else:
                    assert response.status_code == 503, response.text
                    assert "asleep" in response.text or "waits for weights" in response.text
        return answers

    def stop(self) -> list[tuple[list[int], dict]]:
        self._stop.set()
        return [answer for one in self._running for answer in one.result()]


def operation(client, dice: random.Random, directories: dict, number: int) -> None:
    """One call that a trainer could make; refusals are as good as successes."""
    tags = {"tags": dice.sample(TAGS, dice.randint(0, 3))}
    letter = dice.choice("ab")
    update = {"model_path": str(directories[letter]), "weight_version": f"{letter}{number}"}
    path, body = dice.choice(
        [
            ("/pause_generation", {"mode": dice.choice(["abort", "retract", "in_place"])}),
            ("/continue_generation", {}),
            ("/continue_generation", {}),
            ("/release_memory_occupation", tags),
            ("/resume_memory_occupation", tags),
            ("/resume_memory_occupation", {}),
            ("/update_weights_from_disk", update),
            ("/flush_cache", {}),
            ("/abort_request", {"abort_all": True}),
            ("/begin_weight_update", {}),
            ("/end_weight_update", {}),
            ("/sleep", {"level": dice.randint(0, 2), "mode": dice.choice(["abort", "keep"])}),
            ("/wake_up", {}),
            ("/pause", {"mode": dice.choice(["abort", "keep"])}),
            ("/resume", {}),
            ("/weights_checker", {"action": "checksum"}),
            ("/get_weights_by_name", {"name": "model.norm.weight"}),
        ]
    )
    response = client.post(path, json=body)
    assert response.status_code in (200, 400), f"{path} {body}: {response.text}"
    assert client.get("/health").status_code == 200, path


@pytest.mark.parametrize(
    ("seed", "num_operations"),
    [(1, 40), *(pytest.param(seed, 150, marks=pytest.mark.long) for seed in range(2, 5))],
)
def test_any_order_of_calls(
    server, client, pool, first_dir, second_dir, references, seed, num_operations
):
    directories, dice = {"a": first_dir, "b": second_dir}, random.Random(seed)
    body = {"model_path": str(first_dir), "weight_version": "a0"}
    post(client, "/update_weights_from_disk", body)
    rollouts = Rollouts(server, pool, 4)
    for number in range(1, num_operations):
        operation(client, dice, directories, number)
    for path in ("/end_weight_update", "/resume_memory_occupation", "/continue_generation"):
        post(client, path)
    body = {"model_path": str(second_dir), "weight_version": "b-last"}
    post(client, "/update_weights_from_disk", body)
    answers = rollouts.stop()
    assert answers
    told = memory(client)
    assert (told["asleep"], told["waiting_for_weights"]) == ([], False)
    assert ids(client) == ids(references["b"])
    for prompt, result in answers:
        spans, tokens = result["meta_info"].get("weight_versions", []), result["output_ids"]
        assert sum(count for _, count in spans) == len(tokens)
        at = 0
        for version, count in spans:
            own = likeliest(references[version[0]], prompt + tokens, len(prompt) + at)
            assert own[:count] == tokens[at : at + count], (version, at, spans)
            at += count
