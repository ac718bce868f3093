"""The dashboard: one file that asks for nothing else, names fields that exist, and works in a browser
as wide as a phone.
"""

from __future__ import annotations

import asyncio
import re
from importlib import resources
from typing import get_args, get_type_hints

import pytest

from phalanx.gateway.lerobot import RobotView
from phalanx.gateway.pool import PoolEvent
from phalanx.gateway.report import PoolView, ServerView
from phalanx.gateway.roles.board import BoardView, Requests, RoleView
from phalanx.gateway.roles.control_answers import ToldEvent
from phalanx.gateway.traffic import Failure, Quantiles
from phalanx.routing.endpoint import Endpoint
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.routing.snapshot import ServerState
from phalanx.wire.discovery import InternalEngineEntry, InternalModelEntry
from tests.gateway.chromium import browser, chromium
from tests.gateway.lerobot.robots import Robot
from tests.gateway.policy_servers import HOST, infer, request, run
from tests.gateway.whole import ProbedServer, ask, channel, ready, running, until

PAGE = resources.files("phalanx.gateway").joinpath("dashboard.html").read_text("utf-8")
SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
VALUES = {
    "pool": PoolView,
    "seen": PoolView,
    "server": ServerView,
    "event": PoolEvent,
    "failure": Failure,
    "times": Quantiles,
    "robot": RobotView,
    "board": BoardView,
    "role": RoleView,
    "model": InternalModelEntry,
    "engine": InternalEngineEntry,
    "requests": Requests,
    "change": ToldEvent,
}
"""What the script calls the values that it gets."""


@pytest.mark.parametrize(("name", "kind"), VALUES.items())
def test_the_page_names_only_fields_that_exist(name, kind):
    used = set(re.findall(rf"\b{name}\.(\w+)", SCRIPT))
    assert used, f"the page calls nothing {name}"
    assert used <= get_type_hints(kind).keys()


def test_the_page_shows_every_field_of_a_server():
    shown = set(re.findall(r"\bserver\.(\w+)", SCRIPT))
    assert get_type_hints(ServerView).keys() == shown


def test_the_page_names_only_states_that_exist():
    styled = set(re.findall(r"^\.(\w+) \{ color|\} \.(\w+) \{ color", PAGE, re.MULTILINE))
    names = {name for pair in styled for name in pair if name}
    states = {str(state) for state in (*ServerState, *ReplicaState)}
    assert names <= states | {"empty", "blocked"}
    assert {"ready", "unhealthy", "draining", "sleeping", "dead", "blocked"} <= names
    drawn = set(re.findall(r"svg\.life rect\.(\w+)", PAGE))
    assert drawn <= set(map(str, ReplicaState))


def test_the_page_is_one_light_file_without_anything_from_elsewhere():
    assert len(PAGE.encode()) < 28_000
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", PAGE) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", PAGE) == []
    assert "innerHTML" not in SCRIPT and "eval" not in SCRIPT
    assert get_args(get_type_hints(PoolView)["servers"])[0] is ServerView


def test_the_page_is_served_with_a_policy_that_lets_nothing_else_in():
    async def scenario():
        async with running() as gateway:
            answer = await ask(gateway, "GET", "/")
            assert answer.status == 200
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert answer.headers["content-security-policy"].startswith("default-src 'none'")
            assert answer.body.decode() == PAGE

    run(scenario())


TEXT = "document.body.innerText"
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture
def program() -> str:
    found = chromium()
    if found is None:
        pytest.skip("there is no Chromium on this machine; apt-get install chromium")
    return found


NAME = "pi05 <b>not bold</b>"


def row(server_id: str) -> str:
    return f"document.querySelector('[data-server={server_id}]')"


def test_the_page_lives_in_a_browser_as_wide_as_a_phone(program, tmp_path):
    async def scenario():
        server, busy = ProbedServer(), ProbedServer()
        async with (
            running(lerobot=True) as gateway,
            browser(program, tmp_path / "profile") as page,
        ):
            registry = gateway.pool.registry
            await page.open(f"http://{HOST}:{gateway.http_port}/", 375, 812)
            await page.until(f"{TEXT}.includes('No server is registered')")
            first = registry.register_managed(NAME, await server.start()).server_id
            await page.until("document.querySelector('.state.ready')")
            assert await page.evaluate(f"{TEXT}.includes({NAME!r})"), "as text, not as HTML"
            held = registry.register_managed("held", await busy.start()).server_id
            await ready(gateway, 2)
            await use(gateway, page, busy, first, held)
            async with Robot(f"{HOST}:{gateway.grpc_port}", "arm-7") as robot:
                await robot.ready()
                await page.until("document.querySelector('#robots').innerText.includes('arm-7')")
            await page.until("document.querySelector('#failures b')")
            await until(gateway, ServerState.UNHEALTHY, held)
            await page.until(f"{TEXT}.includes('connection refused')")
            registry.register_managed("m" * 200, Endpoint.parse("h" * 60 + ".example:1"))
            await page.until(f"{TEXT}.includes('mmmm')")
            for width in (375, 768, 1280):
                await page.resize(width, 812)
                await page.screenshot(tmp_path / f"dashboard-{width}.png")
                assert await page.evaluate(TOO_WIDE) <= 0, f"too wide for {width} pixels"
            registry.remove(first)
            await page.until(f"!{row(first)}")
            await gateway.close(drain_s=0.0)
            await page.until(f"{TEXT}.includes('No answer from the gateway')")
            assert {url.split("?")[0].rsplit("/", 1)[-1] for url in page.requested} <= {
                "",
                "pool",
                "robots",
            }
            faults = [fault for fault in page.faults if "ERR_CONNECTION_REFUSED" not in fault]
            assert faults == []
        await server.stop()

    asyncio.run(scenario())


async def use(gateway, page, busy: ProbedServer, first: str, held: str) -> None:
    """Requests of both models, of which one's server dies with those that it has."""
    busy.behave = busy.hold
    async with channel(gateway) as client:
        for index in range(20):
            await (await infer(client, request(f"r-{index}", NAME)))
        calls = [await infer(client, request(f"h-{each}", "held")) for each in range(3)]
        await busy.arrived(3)
        await page.until(f"{row(held)} && {row(held)}.children[2].textContent === '3'")
        await page.until(f"{row(first)}.children[3].textContent === '20'")
        assert " ms" in await page.evaluate(f"{row(first)}.children[5].textContent")
        assert await page.evaluate(f"{row(first)}.querySelector('polyline').points.length") == 60
        await busy.stop()
        await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.long
def test_the_page_asks_for_a_key_where_there_is_one(program, tmp_path):
    async def scenario():
        async with (
            running(admin_key="boss") as gateway,
            browser(program, tmp_path / "profile") as page,
        ):
            await page.open(f"http://{HOST}:{gateway.http_port}/", 375, 812)
            form = "document.querySelector('#login')"
            for key, says in (("wrong", "refuses this key"), ("boss", "No server is registered")):
                await page.until(f"!{form}.hidden")
                await page.evaluate(
                    f"document.querySelector('#key').value = {key!r}; {form}.requestSubmit()"
                )
                await page.until(f"{TEXT}.includes({says!r})")
            assert await page.evaluate(f"{form}.hidden")

    asyncio.run(scenario())
