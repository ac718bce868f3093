"""`POST /v1/videos/generations`: what clients send, what comes back, and what ends a request."""

from __future__ import annotations

import io
import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import ClassVar

import httpx
import numpy as np
import pytest
from PIL import Image

from phalanx import Engine
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.schema.server_config import ServerConfig
from phalanx.schema.videos import VideoFile
from phalanx.testing.videos import MAX_STEPS, FakeVideo, FakeVideoAdapter, FakeVideoArgs
from tests.server.conftest import events
from tests.server.running import RunningServer, running

CONFIG = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
PATH = "/v1/videos/generations"


class Gate:
    """Holds the model before a tick, until a test lets it go on."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(30)


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


class Told(VideoFile):
    """Notes the threads that write it into an answer."""

    threads: ClassVar[list[str]] = []

    @property
    def media_type(self) -> str:
        self.threads.append(threading.current_thread().name)
        return super().media_type


class Telling(FakeVideoAdapter):
    def file(self, output, prompt, format):
        file = super().file(output, prompt, format)
        return Told(file.data, file.format)


@pytest.fixture(scope="module")
def server(gate: Gate) -> Iterator[RunningServer]:
    if FakeVideo.name not in Engine.registered():
        Engine.register(FakeVideo)
    args = EngineArgs("fake_video", FakeVideoArgs(before_tick=gate), CONFIG)
    config = ServerConfig(port=0, served_model_name="dream")
    with running(lambda: Engine(args), None, config, Telling()) as running_server:
        yield running_server


@pytest.fixture
def held(gate: Gate) -> Iterator[Gate]:
    gate.reached.clear()
    gate.open.clear()
    yield gate
    gate.open.set()


def image_file(kind: str) -> str:
    target = io.BytesIO()
    Image.fromarray(np.zeros((48, 64, 3), np.uint8)).save(target, kind)
    return b64encode(target.getvalue()).decode()


def test_the_answer_is_the_file(client):
    answer = client.post(
        PATH,
        json={"prompt": "a hand", "size": "832x480", "seed": 3, "guidance_interval": [400, 1000]},
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.json() == {
        "prompt": "a hand",
        "size": [832, 480],
        "seed": 3,
        "guidance_interval": [400, 1000],
    }


def test_one_frame_is_a_picture(client):
    answer = client.post(PATH, json={"prompt": "a hand", "num_frames": 1})
    assert answer.headers["content-type"] == "image/png"


def test_base64_in_json(client):
    body = {"prompt": "a hand", "response_format": "b64_json", "model": "dream"}
    answer = client.post(PATH, json=body).json()
    assert answer["model"] == "dream"
    (item,) = answer["data"]
    assert item["media_type"] == "video/mp4"
    assert json.loads(b64decode(item["b64_json"]))["prompt"] == "a hand"


@pytest.mark.parametrize("form", [{"response_format": "b64_json"}, {"stream": True}])
def test_a_large_file_is_not_written_as_text_in_the_event_loop(client, form):
    Told.threads.clear()
    assert client.post(PATH, json={"prompt": "a wave", **form}).status_code == 200
    assert Told.threads and not any("_run" in name for name in Told.threads)


def test_a_stream_tells_each_step_and_ends_in_the_file(client):
    body = {"prompt": "a hand", "num_inference_steps": 4, "stream": True}
    *steps, last = events(client.post(PATH, json=body))
    assert {one["type"] for one in steps} == {"video_generation.progress"}
    # Steps that were done before they were read are told as one.
    assert steps[-1] == {
        "type": "video_generation.progress",
        "step": 4,
        "num_steps": 4,
        "timestep": 995,
        "progress": 100.0,
    }
    assert last["type"] == "video_generation.completed"
    assert json.loads(b64decode(last["b64_json"]))["prompt"] == "a hand"


@pytest.mark.parametrize("field", ["image", "input_reference"])
@pytest.mark.parametrize("kind", ["png", "jpeg"])
@pytest.mark.parametrize("prefix", ["", "data:image/any;base64,"])
def test_an_image_to_begin_with(client, field, kind, prefix):
    answer = client.post(PATH, json={"prompt": "a hand", field: prefix + image_file(kind)})
    assert answer.json()["image"] == [48, 64, 3]


@pytest.mark.parametrize(
    ("field", "message", "changes"),
    [
        ("promt", "did you mean 'prompt'?", {"promt": "a"}),
        ("prompt", "prompt is empty", {"prompt": "  "}),
        ("size", "must be WIDTHxHEIGHT", {"size": "720p"}),
        ("size", "give one", {"size": "64x48", "width": 64}),
        ("height", "give both or none", {"width": 64}),
        ("width", "multiple of 16", {"size": "65x48"}),
        ("seconds", "give one of both", {"seconds": 4, "num_frames": 9}),
        ("seconds", "must be a number", {"seconds": "four"}),
        ("seconds", "more than 0", {"seconds": "nan"}),
        ("num_frames", "more than 0", {"num_frames": 0}),
        ("fps", "fps=0.001 must be from 0.01 to 1000", {"fps": 0.001}),
        ("fps", "fps=2000.0 must be from 0.01 to 1000", {"fps": 2000}),
        ("num_inference_steps", f"from 1 to {MAX_STEPS}", {"num_inference_steps": 0}),
        ("n", "one video", {"n": 2}),
        ("seed", "from 0 to", {"seed": -1}),
        ("response_format", "allowed: mp4, png, npz, b64_json", {"response_format": "url"}),
        ("output_format", "differ", {"response_format": "mp4", "output_format": "png"}),
        ("sound", "needs response_format=npz", {"sound": True}),
        ("image", "is not base64", {"image": "?"}),
        ("image", "neither a JPEG nor a PNG", {"image": b64encode(b"GIF89a").decode()}),
        ("image", "fetches nothing", {"image": "https://example.org/a.png"}),
        ("image", "data URL", {"image": "data:image/png,x"}),
        ("image", "no readable PNG", {"image": b64encode(b"\x89PNG\r\n\x1a\nxx").decode()}),
        ("video", "no readable video", {"video": b64encode(b"no video").decode()}),
        ("video", "give one of both", {"image": image_file("png"), "video": "clip"}),
        ("model", "this server has 'dream'", {"model": "other"}),
    ],
)
def test_a_mistake_is_named(client, field, message, changes):
    if changes.get("video") == "clip":
        changes = {**changes, "video": clip_file()}
    answer = client.post(PATH, json={"prompt": "a hand", **changes})
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert message in error["message"]


def clip_file(num_frames: int = 9) -> str:
    av = pytest.importorskip("av", reason="clips need PyAV (phalanx[video])")
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for shade in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), shade * 8, np.uint8), "rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return b64encode(target.getvalue()).decode()


@pytest.mark.parametrize("field", ["video", "input_reference"])
def test_the_beginning_of_a_clip_is_gone_on_with(client, field):
    answer = client.post(PATH, json={"prompt": "a hand", field: clip_file()})
    assert answer.json()["clip"] == [5, 48, 64, 3]


def test_a_form_that_does_not_fit_is_refused_before_anything_is_computed(client, gate):
    gate.reached.clear()
    refused = client.post(PATH, json={"prompt": "a", "response_format": "png"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"
    assert not gate.reached.is_set()


def test_a_refusal_of_a_stream_is_a_status(client):
    answer = client.post(PATH, json={"prompt": "a hand", "num_inference_steps": 0, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "num_inference_steps"


def test_the_model_is_listed_and_told(client):
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["dream", "fake_video"]
    assert client.get("/model_info").json()["model_type"] == "fake_video"


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/video-1/content"])
def test_jobs_are_not_kept(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert PATH in answer.json()["error"]["message"]


def test_no_text_is_served(client):
    assert client.post("/v1/chat/completions", json={}).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_model(server, held, stream):
    engine = server.engine
    done = engine.statistics().num_cancelled
    body = {"prompt": "a hand", "num_inference_steps": MAX_STEPS, "stream": stream}
    with (
        server.client() as impatient,
        pytest.raises(httpx.ReadTimeout),
        impatient.stream("POST", PATH, json=body, timeout=httpx.Timeout(30, read=0.2)),
    ):
        raise AssertionError("the model was held")
    assert held.reached.wait(30)
    held.open.set()
    with server.client() as client:  # it ends by that alone, and others are served
        while engine.statistics().num_cancelled == done:
            assert client.post(PATH, json={"prompt": "another"}).status_code == 200
    assert engine.statistics().num_cancelled == done + 1


def test_an_operator_ends_a_video(server, held):
    with server.client() as client, server.client() as operator:
        answers: list[httpx.Response] = []
        body = {"prompt": "a hand", "request_id": "mine"}
        asking = threading.Thread(target=lambda: answers.append(client.post(PATH, json=body)))
        asking.start()
        assert held.reached.wait(30)
        assert operator.post("/abort_request", json={"rid": "mine"}).status_code == 200
        held.open.set()
        asking.join()
    assert answers[0].status_code == 500
    assert "before the video was complete" in answers[0].json()["error"]["message"]


def test_outcomes_are_counted(client):
    def completed() -> float:
        lines = client.get("/metrics").text.splitlines()
        (line,) = [one for one in lines if 'phalanx_requests_total{outcome="completed"}' in one]
        return float(line.split()[-1])

    before = completed()
    client.post(PATH, json={"prompt": "a hand"})
    assert completed() == before + 1
