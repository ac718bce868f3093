"""Videos of Cosmos3 as they are served: a real server process with a gateway in front."""

from __future__ import annotations

import io
import json
from base64 import b64decode
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from tests.caches import own_cache
from tests.models.cosmos3.served import EXAMPLES, PLAIN, behind_a_gateway, process

PATH = "/v1/videos/generations"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return own_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def videos(cache) -> Iterator[str]:
    with process(cache, "serve", str(EXAMPLES / "cosmos3.yaml"), *PLAIN) as server:
        yield server["url"]


@pytest.fixture(scope="module")
def gateway(cache, videos) -> Iterator[httpx.Client]:
    with (
        behind_a_gateway(cache, "cosmos3", videos) as front,
        httpx.Client(base_url=front["front"], timeout=120) as client,
    ):
        yield client


def frames_of(data: bytes) -> np.ndarray:
    av = pytest.importorskip("av", reason="clips need PyAV (phalanx[video])")
    with av.open(io.BytesIO(data)) as container:
        return np.stack([one.to_ndarray(format="rgb24") for one in container.decode(video=0)])


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[-1])


def test_a_video_comes_through_the_gateway_and_plays(gateway):
    answer = gateway.post(PATH, json={"model": "cosmos3", "prompt": "a hand picks up a cube"})
    assert answer.status_code == 200, answer.text
    assert frames_of(answer.content).shape == (9, 96, 128, 3)


def test_a_seed_says_which_video_it_is(gateway):
    body = {"model": "cosmos3", "prompt": "a cube", "num_frames": 5, "response_format": "npz"}

    def pixels(seed: int) -> np.ndarray:
        data = gateway.post(PATH, json={**body, "seed": seed}).content
        return np.load(io.BytesIO(data))["video"]

    first = pixels(3)
    # Within rounding: the second time its prompt has been read before.
    assert np.abs(pixels(3) - first).max() < 1e-3
    assert np.abs(pixels(4) - first).max() > 0.1


def test_progress_comes_through_the_gateway(gateway):
    body = {"model": "cosmos3", "prompt": "a hand", "num_inference_steps": 4, "stream": True}
    with gateway.stream("POST", PATH, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    *told, end = lines
    *steps, last = map(json.loads, told)
    assert end == "[DONE]"
    assert [one["step"] for one in steps] == sorted({one["step"] for one in steps})
    assert (steps[-1]["step"], steps[-1]["num_steps"]) == (4, 4)
    assert frames_of(b64decode(last["b64_json"])).shape == (9, 96, 128, 3)


def test_a_picture_begins_a_video(gateway):
    body = {"model": "cosmos3", "prompt": "a hand", "num_frames": 1, "num_inference_steps": 2}
    picture = gateway.post(PATH, json={**body, "response_format": "b64_json"}).json()
    (item,) = picture["data"]
    assert item["media_type"] == "image/png"
    answer = gateway.post(PATH, json={**body, "num_frames": 5, "image": item["b64_json"]})
    assert answer.status_code == 200, answer.text
    assert frames_of(answer.content).shape == (5, 96, 128, 3)
    clip = gateway.post(
        PATH, json={**body, "num_frames": 9, "sound": True, "response_format": "npz"}
    )
    arrays = np.load(io.BytesIO(clip.content))
    assert arrays["video"].shape == (3, 9, 96, 128)
    assert arrays["sound"].shape == (5, 29)


def test_a_refusal_comes_through_the_gateway(gateway):
    body = {"model": "cosmos3", "prompt": "a hand", "size": "1280x720", "num_frames": 189}
    answer = gateway.post(PATH, json=body)
    assert answer.status_code == 400
    assert "max_tokens=4096" in answer.json()["error"]["message"]
    assert gateway.post(PATH, json={**body, "model": "other"}).status_code == 404


def test_whoever_leaves_the_gateway_frees_the_model(gateway, videos):
    """The next one is computed at once, and not behind a thousand steps."""
    aborted = 'phalanx_engine_requests_total{outcome="aborted"}'
    before = metric(videos, aborted)
    body = {"model": "cosmos3", "prompt": "a hand", "num_inference_steps": 1000, "stream": True}
    with gateway.stream("POST", PATH, json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    assert gateway.post(PATH, json={**body, "num_inference_steps": 1}).status_code == 200
    while metric(videos, aborted) == before:
        pass
    assert metric(videos, "phalanx_in_flight_requests") == 0
