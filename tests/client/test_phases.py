"""The client of phases against what a control process may answer, or not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from phalanx.client import AsyncPhaseClient, PhaseClient, RoleClientSettings
from phalanx.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineUnavailableError,
    RequestFailedError,
    RoleOperationFailedError,
    RoleOperationRefusedError,
)
from phalanx.wire.phases import PhasesDocument, TransitionView

DOCUMENT = PhasesDocument(number=5, mode="defer", phases=(), phase="rollout", batch="1")
HURRIED = RoleClientSettings(retry_s=0.001)
Answer = tuple[int, object]


def refusal(code: str, status: int = 409) -> Answer:
    return status, {"error": {"code": code, "message": f"it is {code}"}}


class Control:
    """Answers one request after another by a script; None hangs up."""

    def __init__(self, answers: list[Answer | None]) -> None:
        self.asked: list[tuple[str, dict[str, object]]] = []
        self._answers = answers

    def answer(self, path: str, body: bytes) -> Answer | None:
        self.asked.append((path, msgspec.json.decode(body or b"{}")))
        return self._answers.pop(0)

    def ids(self) -> list[object]:
        return [body["operation_id"] for _, body in self.asked if "operation_id" in body]


@contextmanager
def control(*answers: Answer | None):
    told = Control(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            answer = told.answer(self.path, self.rfile.read(length))
            if answer is None:
                self.close_connection = True
                return
            body = msgspec.json.encode(answer[1])
            self.send_response(answer[0])
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield told, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def client(url: str) -> PhaseClient:
    return PhaseClient(url, settings=HURRIED)


def test_what_was_lost_is_asked_for_again_with_the_same_id():
    with control(None, refusal("unavailable", 503), (200, DOCUMENT)) as (told, url):
        with client(url) as phases:
            assert phases.enter("rollout", "1") == DOCUMENT
    assert len(told.ids()) == 3
    assert len(set(told.ids())) == 1


def test_it_waits_for_its_turn():
    under_way = TransitionView(phase="x", operation_id="y", step="s", since_wall_s=0.0)
    changing = msgspec.structs.replace(DOCUMENT, number=7, transition=under_way)
    answers = (refusal("busy"), (200, changing), (200, DOCUMENT), (200, DOCUMENT))
    with control(*answers) as (told, url), client(url) as phases:
        assert phases.leave() == DOCUMENT
    assert [path for path, _ in told.asked] == [
        "/v1/phases/leave",
        "/v1/phases",
        "/v1/phases?after=7&wait_s=20",
        "/v1/phases/leave",
    ]
    assert len(set(told.ids())) == 1


def test_a_phase_that_a_restart_has_ended_is_entered_again():
    over = msgspec.structs.replace(DOCUMENT, phase=None)
    with control((200, over), (200, DOCUMENT)) as (told, url), client(url) as phases:
        assert phases.enter("rollout", "1") == DOCUMENT
    first, second = told.ids()
    assert first != second
    with control((200, over)) as (told, url), client(url) as phases:
        assert phases.enter("rollout", "1", operation_id="mine") == over
    assert told.ids() == ["mine"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal("refused"), RoleOperationRefusedError),
        (refusal("failed", 503), RoleOperationFailedError),
        (refusal("invalid_request", 400), ConfigurationError),
        (refusal("unauthorized", 401), ConfigurationError),
        (refusal("http", 404), ConfigurationError),
        (refusal("not_found", 404), ConfigurationError),
        (refusal("forbidden", 403), ConfigurationError),
        ((500, "nonsense"), RequestFailedError),
        ((200, "nonsense"), RequestFailedError),
    ],
)
def test_a_refusal_is_what_it_means(answer, kind):
    calls: list[Callable[[PhaseClient], object]] = [
        lambda phases: phases.enter("rollout", "1"),
        lambda phases: phases.recover(("rollout",)),
        lambda phases: phases.attach("t"),
        lambda phases: phases.release("t"),
        lambda phases: phases.phases(),
    ]
    with control(*[answer] * len(calls)) as (_, url), client(url) as phases:
        for call in calls:
            with pytest.raises(kind):
                call(phases)


def test_the_time_that_it_had_is_told_with_what_it_waited_for():
    with control() as (_, url):
        pass
    with client(url) as phases:
        with pytest.raises(DeadlineExceededError, match=r"enter rollout: .* does not answer"):
            phases.enter("rollout", "1", timeout_s=0.05)
    with pytest.raises(EngineUnavailableError):
        phases.phases()


def test_a_trainer_tells_its_own_number_or_none():
    with control(*[(200, DOCUMENT)] * 6) as (told, url), client(url) as phases:
        phases.attach("t", holds=True)
        phases.attach("t", pid=7)
        phases.attach("t", elsewhere=True)
    own, other, none = (body for path, body in told.asked if path == "/v1/trainer/attach")
    assert own["seen"] == DOCUMENT.number, "it has looked first"
    assert isinstance(own["pid"], int)
    assert own["holds"] is True
    assert (other["pid"], none.get("pid")) == (7, None)


def test_the_synchronous_client_is_refused_inside_a_loop():
    async def scenario():
        with pytest.raises(ConfigurationError, match="AsyncPhaseClient"):
            PhaseClient("http://127.0.0.1:1")

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://h/v1", "ftp://h", "http://"])
def test_an_address_that_is_none_is_refused(url):
    async def scenario():
        with pytest.raises(ConfigurationError, match="control_url"):
            AsyncPhaseClient(url)

    asyncio.run(scenario())
