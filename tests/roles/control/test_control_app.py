"""The control process over HTTP, on fake engines: what is asked arrives, and refusals are named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from phalanx.clock import Clock
from phalanx.roles.config import parse_job
from phalanx.roles.control_app import ControlApi
from phalanx.roles.control_messages import Job, JobStage, RoleStatus
from phalanx.roles.events import EventLog
from phalanx.roles.manager import InferenceManager
from phalanx.roles.publication import initial_content
from phalanx.routing.roles.documents import internal
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.testing.clock import ManualClock
from phalanx.testing.role_fakes import FakeRoleWorld
from phalanx.testing.virtual_time import run_virtual
from phalanx.wire.discovery import InternalDocument
from tests.roles.coordination.case import plain_coordinator

FILE = """
roles:
  rollout: {models: {student: {model: m, replicas: 2, weight_source: local, fault_tolerance: false}}}
  genrm: {models: {judge: {model: m, elastic: false}}}
  teacher: {models: {big: {model: m, weight_source: dcs}, other: {model: m, weight_source: actor}}}
"""


class App:
    """The application with its managers, and a client of it."""

    def __init__(self, clock: Clock, key: str | None) -> None:
        self.world = FakeRoleWorld()
        self.events = EventLog(clock)
        self.stops: list[bool] = []
        self.managers = {
            spec.role: InferenceManager(
                spec,
                self.world.backends,
                RoleRegistry(spec.role, "e1", initial_content(spec)),
                clock,
                self.events,
            )
            for spec in parse_job(FILE, "r.yaml").roles
        }
        api = ControlApi(
            self.managers,
            plain_coordinator(self.managers, clock, self.events),
            self.events,
            epoch="e1",
            describe=self.describe,
            stop=self.stops.append,
            key=key,
        )
        transport = httpx.ASGITransport(api.app(), raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:1")

    async def describe(self) -> Job:
        return Job(
            name="mine",
            epoch="e1",
            stage=JobStage.RUNNING,
            pid=1,
            started_wall_s=0.0,
            control_url="http://control",
            gateway_url="http://gateway",
            gateway_up=True,
            log_directory="logs",
            last_event=self.events.last_number,
            roles=tuple(
                RoleStatus(internal(manager.registry.snapshot), {})
                for manager in self.managers.values()
            ),
        )

    async def post(self, path: str, body: object = None, status: int = 200) -> InternalDocument:
        answer = await self.client.post(path, json={} if body is None else body)
        assert answer.status_code == status, answer.text
        return msgspec.json.decode(answer.content, type=InternalDocument)

    async def refused(self, path: str, body: object, status: int) -> str:
        answer = await self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]["message"]


@asynccontextmanager
async def running(key: str | None = None) -> AsyncIterator[App]:
    app = App(ManualClock(), key)
    await asyncio.gather(*(manager.start() for manager in app.managers.values()))
    try:
        yield app
    finally:
        await asyncio.gather(*(manager.shutdown(0.0) for manager in app.managers.values()))
        await app.client.aclose()


def states(document: InternalDocument, model: str) -> list[str]:
    return [engine.state for engine in document.models[model].engines]


def test_roles_are_listed_and_their_documents_are_complete():
    async def scenario():
        async with running() as app:
            listed = (await app.client.get("/v1/roles")).json()
            assert listed == {"roles": ["rollout", "genrm", "teacher"], "epoch": "e1"}
            document = (await app.client.get("/v1/roles/rollout")).json()
            assert document["registry_epoch"] == "e1"
            first = document["models"]["student"]["engines"][0]
            assert first["base_url"].startswith("http://10.")
            assert first["exposed"] is True
            job = msgspec.json.decode((await app.client.get("/v1/job")).content, type=Job)
            assert [status.document.role for status in job.roles] == listed["roles"]

    run_virtual(scenario())


def test_who_waits_gets_the_next_document_when_it_is_there():
    async def scenario():
        async with running() as app:
            now = (await app.client.get("/v1/roles/genrm")).json()["topology_revision"]
            target = f"/v1/roles/genrm?after={now}&epoch=e1&wait_s=50"
            waiting = asyncio.create_task(app.client.get(target))
            await asyncio.sleep(0)
            drained = await app.post("/v1/roles/genrm/drain")
            assert (await waiting).json()["topology_revision"] > now
            again = await app.client.get(
                f"/v1/roles/genrm?after={drained.topology_revision}&epoch=e1&wait_s=5"
            )
            assert again.json()["topology_revision"] == drained.topology_revision
            anew = await app.client.get("/v1/roles/genrm?after=99&epoch=before&wait_s=50")
            assert anew.json()["registry_epoch"] == "e1"

    run_virtual(scenario())


def test_i80_i83_a_role_is_drained_put_to_sleep_and_woken():
    async def scenario():
        async with running() as app:
            role = "/v1/roles/rollout"
            assert states(await app.post(f"{role}/drain"), "student") == ["draining"] * 2
            assert states(await app.post(f"{role}/deactivate"), "student") == ["sleeping"] * 2
            again = await app.post(f"{role}/deactivate")
            part = await app.post(f"{role}/activate", {"tags": ["weights"]})
            assert "ready" not in states(part, "student")
            woken = await app.post(f"{role}/activate", {"tags": None})
            assert woken.topology_revision > again.topology_revision
            assert states(woken, "student") == ["ready"] * 2
            assert app.world.misused == []

    run_virtual(scenario())


def test_a_model_is_scaled_and_gets_weights():
    async def scenario():
        async with running() as app:
            model = "/v1/roles/rollout/models/student"
            scaled = await app.post(f"{model}/scale", {"replicas": 3})
            assert states(scaled, "student") == ["ready"] * 3
            newer = await app.post(f"{model}/weights", {"path": "/c", "version": "7"})
            assert {engine.weight_version for engine in newer.models["student"].engines} == {"7"}
            assert app.world.engine("student/2").loads[-1:] == ["7"]

    run_virtual(scenario())


def test_i95_models_register_for_broadcasts_and_static_ones_do_not():
    async def scenario():
        async with running() as app:
            answer = await app.client.post("/v1/roles/teacher/models/big/broadcasts", json={})
            assert answer.json() == {"model": "big", "version": None}
            told = {"path": "/c", "version": 3}
            answer = await app.client.post("/v1/roles/teacher/models/big/broadcasts", json=told)
            assert answer.json() == {"model": "big", "version": 3}
            static = "/v1/roles/genrm/models/judge"
            assert "static" in await app.refused(f"{static}/broadcasts", {}, 400)
            told = {"path": "/c", "version": "3"}
            assert "static" in await app.refused(f"{static}/weights", told, 400)

    run_virtual(scenario())


def test_a_trainers_weights_are_confirmed():
    async def scenario():
        async with running() as app:
            engine = app.world.engine("other/0")
            engine.put_weights("9")
            model = "/v1/roles/teacher/models/other"
            confirmed = await app.post(f"{model}/weights/confirm", {"version": "9"})
            assert states(confirmed, "other") == ["ready"]

    run_virtual(scenario())


def test_a_dead_replica_is_recovered_and_one_that_serves_is_not():
    async def scenario():
        async with running() as app:
            role = "/v1/roles/rollout"
            message = await app.refused(f"{role}/recover", {"engine_id": "student/0"}, 409)
            assert "student/0" in message
            app.world.engine("student/0").crash()
            await asyncio.sleep(1)  # of virtual time
            recovered = await app.post(f"{role}/recover", {"engine_id": "student/0"})
            assert recovered.models["student"].engines[0].generation == 2
            await app.post(f"{role}/unblock", {"engine_id": "student/1"})
            await app.refused(f"{role}/unblock", {"engine_id": "student/7"}, 400)

    run_virtual(scenario())


def test_the_phase_of_the_job_is_shown():
    async def scenario():
        async with running() as app:
            assert (await app.post("/v1/roles/genrm/phase", {"phase": "score"})).phase == "score"
            assert (await app.post("/v1/roles/genrm/phase", {"phase": None})).phase is None

    run_virtual(scenario())


def test_events_are_told_as_they_come():
    async def scenario():
        async with running() as app:
            told = (await app.client.get("/v1/events")).json()
            assert told["last"] == told["events"][-1]["number"] > 0
            waiting = asyncio.create_task(
                app.client.get(f"/v1/events?after={told['last']}&wait_s=50")
            )
            await asyncio.sleep(0)
            await app.post("/v1/roles/genrm/drain")
            (first, *_) = (await waiting).json()["events"]
            assert (first["role"], first["number"]) == ("genrm", told["last"] + 1)

    run_virtual(scenario())


def test_the_end_is_begun_and_not_waited_for():
    async def scenario():
        async with running() as app:
            for body, now in ((None, False), ({"now": True}, True)):
                answer = await app.client.post("/v1/shutdown", json=body)
                assert answer.status_code == 202
                assert app.stops[-1] is now

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/roles/judge/drain", {}, 404, "there is no role 'judge'; roles: rollout, genrm, te"),
        ("/v1/roles/rollout/models/x/scale", {"replicas": 1}, 404, "has no model 'x'; models: st"),
        ("/v1/roles/rollout/models/student/scale", {}, 400, "`replicas`"),
        ("/v1/roles/rollout/models/student/scale", {"replicas": "2"}, 400, "Expected `int`"),
        ("/v1/roles/rollout/models/student/scale", {"replica": 2}, 400, "unknown field `replica`"),
        ("/v1/roles/rollout/models/student/scale", {"replicas": -1}, 400, "replicas"),
        ("/v1/roles/genrm/models/judge/scale", {"replicas": 2}, 400, "elastic"),
        ("/v1/roles/rollout/activate", {"tags": ["weigths"]}, 400, "Invalid enum value"),
        ("/v1/roles/rollout/recover", {"engine_id": "x/0"}, 400, "x/0"),
        ("/v1/roles/teacher/models/big/broadcasts", {"path": "/c"}, 400, "give both or neither"),
        ("/v1/nothing", {}, 404, "/v1/nothing: Not Found"),
        ("/v1/roles", {}, 405, "/v1/roles: Method Not Allowed"),
    ],
)
def test_mistakes_are_named(path, body, status, says):
    async def scenario():
        async with running() as app:
            assert says in await app.refused(path, body, status)

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("/v1/roles/genrm?after=x", "after='x' must be a whole number"),
        ("/v1/roles/genrm?after=1&wait_s=61", "wait_s='61' must be from 0 to 60"),
        ("/v1/events?wait_s=nan", "wait_s='nan' must be"),
    ],
)
def test_wrong_questions_are_named(target, says):
    async def scenario():
        async with running() as app:
            answer = await app.client.get(target)
            assert answer.status_code == 400
            assert says in answer.json()["error"]["message"]

    run_virtual(scenario())


def test_a_drain_waits_for_a_follower_to_ask_for_what_comes_after_it():
    async def scenario():
        async with running() as app:
            await app.post("/v1/roles/genrm/activate")
            path = "/v1/roles/genrm?follower=g"
            revision = (await app.client.get(path)).json()["topology_revision"]
            asked = f"{path}&epoch=e1&wait_s=20&after="
            following = asyncio.create_task(app.client.get(f"{asked}{revision}"))
            draining = asyncio.create_task(app.post("/v1/roles/genrm/drain"))
            told = (await following).json()["topology_revision"]
            await asyncio.sleep(1.0)
            assert not draining.done()
            following = asyncio.create_task(app.client.get(f"{asked}{told}"))
            await asyncio.sleep(0.5)
            assert draining.done()
            following.cancel()

    run_virtual(scenario())


def test_a_body_that_is_no_json_or_too_large_is_refused():
    async def scenario():
        async with running() as app:
            answer = await app.client.post("/v1/roles/genrm/activate", content=b"{")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
            answer = await app.client.post("/v1/roles/genrm/activate", content=b" " * 2**20 + b"{}")
            assert answer.status_code == 400

            async def endless() -> AsyncIterator[bytes]:
                while True:
                    yield b" " * 2**20

            answer = await app.client.post("/v1/roles/genrm/activate", content=endless())
            assert "larger than" in answer.json()["error"]["message"]

    run_virtual(scenario())


def test_after_the_end_everything_is_503():
    async def scenario():
        async with running() as app:
            await app.managers["genrm"].shutdown(0.0)
            await app.refused("/v1/roles/genrm/activate", {}, 503)

    run_virtual(scenario())


def test_with_a_key_only_health_is_open():
    async def scenario():
        async with running(key="k") as app:
            assert (await app.client.get("/health")).status_code == 200
            for headers, status in (
                ({}, 401),
                ({"authorization": "Bearer x"}, 401),
                ({"authorization": "Bearer k"}, 200),
            ):
                assert (await app.client.get("/v1/job", headers=headers)).status_code == status

    run_virtual(scenario())


def test_a_browsers_page_is_refused():
    async def scenario():
        async with running() as app:
            for headers in (
                {"origin": "http://127.0.0.1:1"},
                {"origin": "null"},
                {"sec-fetch-site": "cross-site"},
                # A name that a page's owner has had mean this machine: then it is of one origin.
                {"host": "page.example:1"},
            ):
                answer = await app.client.post("/v1/shutdown", json={}, headers=headers)
                assert answer.status_code == 403, headers
                assert (await app.client.get("/v1/job", headers=headers)).status_code == 403
            assert app.stops == []
            for host in ("localhost:1", "[::1]:1", "127.0.0.1"):
                answer = await app.client.get("/v1/job", headers={"host": host})
                assert answer.status_code == 200

    run_virtual(scenario())


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "text/json"])
def test_a_body_of_a_kind_that_a_page_may_send_unasked_is_refused(kind):
    async def scenario():
        async with running() as app:
            answer = await app.client.post(
                "/v1/shutdown", content=b'{"now":true}', headers={"content-type": kind}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "not_json")
            assert app.stops == []

    run_virtual(scenario())
