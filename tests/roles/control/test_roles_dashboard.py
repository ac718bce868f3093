"""The gateway's page shows a job: its roles, replicas, states, requests and what happens."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.testing.role_faults import Fault
from tests.gateway.chromium import browser, chromium
from tests.gateway.policy_servers import HOST
from tests.gateway.whole import running
from tests.roles.control.jobs import fake_job

TEXT = "document.body.innerText"
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
FILE = """
gateway: {http_port: 0, drain_timeout_s: 0.1}
roles:
  rollout:
    models: {student: {model: m, replicas: 2, weight_source: local, fault_tolerance: false}}
  genrm:
    deployment: {offload_timeout_s: 0.2, drain_timeout_s: 0.2}
    models: {judge: {model: m, fault_tolerance: false}}
"""


@pytest.fixture
def program() -> str:
    found = chromium()
    if found is None:
        pytest.skip("there is no Chromium on this machine; apt-get install chromium")
    return found


def replica(name: str) -> str:
    return f"document.querySelector('[data-replica=\"{name}\"]')"


def state(name: str, wanted: str) -> str:
    return f"{replica(name)} && {replica(name)}.querySelector('.state.{wanted}')"


@pytest.mark.long
def test_the_page_shows_a_job_on_a_phone_too(program, tmp_path):
    async def scenario():
        async with fake_job(tmp_path, FILE) as job:
            await job.process.start()
            control = job.process.control_url
            async with (
                running(roles=control) as gateway,
                browser(program, tmp_path / "profile") as page,
            ):
                await page.open(f"http://{HOST}:{gateway.http_port}/", 375, 812)
                await page.until(state("rollout student/1", "ready"))
                await page.until(state("genrm judge/0", "ready"))
                for shown in ("/rollout", "/genrm", "2 of 2 replicas ready", "models ready"):
                    assert await page.evaluate(f"{TEXT}.includes({shown!r})"), shown
                assert not await page.evaluate(f"{TEXT}.includes('No server is registered')")
                await use(job, page)
                for width in (375, 768, 1280):
                    await page.resize(width, 1600)
                    await page.screenshot(tmp_path / f"roles-{width}.png")
                    assert await page.evaluate(TOO_WIDE) <= 0, f"too wide for {width} pixels"
                await job.process.close()
                await page.until(f"{TEXT}.includes('The control process is not heard')")
                assert {url.split("?")[0].rsplit("/", 1)[-1] for url in page.requested} <= {
                    "",
                    "pool",
                    "roles",
                }
                assert page.faults == []

    asyncio.run(scenario())


async def use(job, page) -> None:
    """What happens to the job is on the page."""
    rollout = job.process.manager("rollout")
    rollout.set_phase("score")
    await page.until(f"{TEXT}.includes('phase score')")
    await rollout.deactivate()
    await page.until(state("rollout student/0", "sleeping"))
    await rollout.activate()
    await rollout.update_weights("student", "/c", "v7")
    await page.until(f"{replica('rollout student/0')}.innerText.includes('v7')")
    job.world.engine("student/1").crash()
    await page.until(state("rollout student/1", "dead"))
    await page.until(f"{replica('rollout student/1')}.innerText.includes('it crashed')")
    await rollout.recover("student/1")
    await page.until(f"{replica('rollout student/1')}.innerText.includes('start 2')")
    lives = f"[...{replica('rollout student/1')}.querySelectorAll('rect')].map((r) => r.className.baseVal)"
    await page.until(f"{lives}.includes('dead') && {lives}.at(-1) === 'ready'")
    await rollout.scale("student", 1)
    await page.until(f"!{replica('rollout student/1')}")
    job.world.faults.next("release", [Fault.UNANSWERED])
    job.world.faults.always("resident", Fault.UNSENT)
    with pytest.raises(Exception, match="judge/0"):
        await job.process.manager("genrm").deactivate()
    job.world.faults.stop()
    await page.until(state("genrm judge/0", "blocked"))
    changes = "document.querySelector('#events').innerText"
    for told in ("student/1 dead: it crashed", "student/0 weights: v7", "sleep"):
        await page.until(f"{changes}.includes({told!r})")
