"""A router's client against one that is told what to answer, and routers that do not start."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import httpx
import pytest

from phalanx.roles.contracts import EngineCallError
from phalanx.roles.router_process import RouterSettings, RouterStarter
from phalanx.roles.sglang_router import DROPPED_FIELDS, SGLangRouter
from phalanx.schema.roles import EngineGroupSpec, RouteMode, WorkerType
from tests.roles.launching.specs import model_of

URL = "http://127.0.0.1:4001"
REGULAR = EngineGroupSpec()


class Router:
    """Knows workers a few questions after it was told of them, and forgets them as late."""

    def __init__(self, *, latency: int = 2, failure: str | None = None) -> None:
        self.latency, self.failure = latency, failure
        self.workers: dict[str, int] = {}
        self.removing: dict[str, int] = {}
        self.told: list[tuple[str, str, dict]] = []
        self.shown_healthy: set[str] = set()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "POST":
            body = json.loads(request.content)
            self.told.append(("POST", path, body))
            self.workers[body["url"]] = self.latency
            return httpx.Response(202, json={"status": "accepted", "worker_id": body["url"]})
        if request.method == "DELETE":
            url = path.removeprefix("/workers/")
            if url not in self.workers:
                return httpx.Response(404, json={"code": "WORKER_NOT_FOUND"})
            self.told.append(("DELETE", path, {}))
            self.removing.setdefault(url, self.latency)
            return httpx.Response(202, json={"status": "accepted"})
        if path == "/workers":
            return httpx.Response(200, json={"workers": self._listed()})
        status = "failed" if self.failure else "processing"
        job = {"job_type": "AddWorker", "status": status, "message": self.failure}
        return httpx.Response(200, json={"job_status": job})

    def _listed(self) -> list[dict[str, object]]:
        for url, left in list(self.removing.items()):
            self.removing[url] = left - 1
            if left <= 0:
                del self.removing[url], self.workers[url]
        found = []
        for url, left in self.workers.items():
            self.workers[url] = max(0, left - 1)
            if self.failure is None and left < 2:
                found.append({"id": url, "url": url, "is_healthy": left == 0})
                self.shown_healthy |= {url} if left == 0 else set()
        return found


def client_of(router: object, **fields: object) -> SGLangRouter:
    transport = httpx.MockTransport(router)
    return SGLangRouter("http://router:1", transport=transport, **fields)


def test_a_replica_is_added_when_the_router_counts_it_as_healthy():
    router = Router()

    async def main() -> None:
        client = client_of(router)
        await client.add(URL, REGULAR, None)
        assert router.shown_healthy == {URL}
        await client.add(URL, REGULAR, None)
        await client.remove(URL)
        assert router.workers == {}
        await client.remove(URL)
        await client.close()

    asyncio.run(main())
    methods = [method for method, _, _ in router.told]
    assert methods[0] == "POST" and set(methods[1:]) == {"DELETE"}
    assert router.told[0][2] == {"url": URL, "worker_type": "regular"}


def test_a_prefill_worker_is_added_with_its_bootstrap_port():
    router = Router()

    async def main() -> None:
        client = client_of(router)
        await client.add(URL, EngineGroupSpec(worker_type=WorkerType.PREFILL), 8998)
        await client.close()

    asyncio.run(main())
    assert router.told[0][2] == {"url": URL, "worker_type": "prefill", "bootstrap_port": 8998}


def test_a_registration_that_the_router_gives_up_is_refused():
    router = Router(failure="no such host")

    async def main() -> EngineCallError:
        client = client_of(router)
        with pytest.raises(EngineCallError, match="cannot register .*: no such host") as caught:
            await client.add(URL, REGULAR, None)
        await client.close()
        return caught.value

    assert not asyncio.run(main()).uncertain


def test_one_that_takes_too_long_is_uncertain_and_not_thought_gone():
    router = Router(latency=10**9)

    async def main() -> None:
        client = client_of(router, register_timeout_s=0.02)
        with pytest.raises(EngineCallError, match="as healthy after") as caught:
            await client.add(URL, REGULAR, None)
        assert caught.value.uncertain
        with pytest.raises(EngineCallError, match="still has") as caught:
            await client.remove(URL)
        assert caught.value.uncertain
        await client.close()

    asyncio.run(main())
    assert [method for method, _, _ in router.told] == ["POST"]


@pytest.mark.parametrize(
    ("answer", "uncertain", "gone"),
    [
        (httpx.Response(400, json={"error": "bad"}), False, False),
        (httpx.Response(500, text="oops"), True, False),
        (httpx.Response(200, text="a page"), False, False),
        (httpx.Response(404, text="no"), False, False),
        (httpx.Response(200, json={"engines": []}), False, False),
        (httpx.ConnectError("refused"), False, True),
        (httpx.ReadTimeout(""), True, False),
    ],
)
def test_what_is_no_router_is_told(answer, uncertain, gone):
    def respond(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> EngineCallError:
        client = client_of(respond)
        assert not await client.answers()
        with pytest.raises(EngineCallError) as caught:
            await client.add(URL, REGULAR, None)
        await client.close()
        return caught.value

    error = asyncio.run(main())
    assert (error.uncertain, error.gone) == (uncertain, gone)


def routed(**fields: object):
    return model_of(route_mode=RouteMode.SGLANG_ROUTER, **fields)


def test_a_router_that_ends_is_told_with_its_log_and_how_to_install_it(tmp_path):
    settings = RouterSettings(tmp_path, python=sys.executable)

    async def main() -> None:
        with pytest.raises(EngineCallError, match="'student' did not start: it ended") as caught:
            await RouterStarter(settings).open("rollout", routed())
        assert "No module named 'sglang_router'" in str(caught.value)
        assert "pip install sglang-router" in str(caught.value)

    asyncio.run(main())
    assert (tmp_path / "rollout" / "student" / "router.log").exists()


def test_somebody_elses_router_that_is_silent_is_not_waited_for_for_ever(tmp_path):
    settings = RouterSettings(tmp_path, startup_timeout_s=0.05)

    async def main() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(EngineCallError, match=r"does not answer after 0\.05 s"):
            await RouterStarter(settings).open("rollout", routed(router_url=url))
        server.close()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert not list(tmp_path.iterdir())


def test_i25_opening_one_warns_of_what_it_does_not_pass_on(tmp_path, caplog):
    settings = RouterSettings(tmp_path, startup_timeout_s=0.01)

    async def main() -> None:
        with pytest.raises(EngineCallError):
            model = routed(router_url="http://127.0.0.1:1")
            await RouterStarter(settings).open("rollout", model)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    (record,) = [one for one in caplog.records if one.name.endswith("router_process")]
    assert "route_mode direct" in record.getMessage()
    assert "return_routed_experts" in record.getMessage()


@pytest.mark.parametrize("path", DROPPED_FIELDS)
def test_i25_what_it_does_not_pass_on_is_documented(path):
    page = Path(__file__).parents[3] / "docs" / "role-engines.md"
    (row,) = [line for line in page.read_text().splitlines() if line.startswith(f"| `{path}` |")]
    assert [name for name in DROPPED_FIELDS[path] if f"`{name}`" not in row] == []
