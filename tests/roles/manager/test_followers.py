"""An engine is not stopped before whoever sends it requests has heard that it gets none."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.roles.followers import NOTHING, PATIENCE_S, Followers
from phalanx.testing.role_fakes import FakeRequest
from phalanx.testing.virtual_time import run_virtual
from tests.roles.manager.case import Case, case, model, run


async def slow_gateway(c: Case, sent: list[FakeRequest], delay_s: float) -> None:
    """Takes a snapshot a while after it has come, and sends by the one before until then."""
    known = c.registry.snapshot
    while True:
        with c.manager.followers.asking("gateway", known.revision):
            snapshot = await c.registry.wait(known.revision, 20.0)
        await asyncio.sleep(delay_s)
        for replica in known.content.by_name["m"].serving:
            sent.append(c.world.by_url(replica.base_url).send(0.1))
        known = snapshot


@pytest.mark.parametrize("operation", ["scale", "shutdown", "deactivate"])
def test_what_a_gateway_sends_before_it_has_heard_of_a_drain_is_served(operation):
    async def scenario():
        c, sent = case(model(replicas=2, elastic_enabled=True)), []
        await c.manager.start()
        following = asyncio.create_task(slow_gateway(c, sent, 1.0))
        await asyncio.sleep(0)
        acts = {
            "scale": lambda: c.manager.scale("m", 1),
            "shutdown": c.manager.shutdown,
            "deactivate": c.manager.deactivate,
        }
        await acts[operation]()
        following.cancel()
        assert [request.ended for request in sent] == ["finished"] * len(sent)
        assert len(sent) >= 2
        await c.manager.shutdown()

    run(scenario)


def test_one_that_hangs_or_is_gone_holds_nothing_up_for_long():
    async def scenario():
        loop = asyncio.get_running_loop()
        followers = Followers()
        with followers.asking("hangs", NOTHING):
            before_s = loop.time()
            await followers.have(0)
            assert loop.time() - before_s == pytest.approx(PATIENCE_S)
        with followers.asking("goes", 3):
            await followers.have(3)
        before_s = loop.time()
        await followers.have(4)
        assert loop.time() - before_s == pytest.approx(PATIENCE_S)
        await followers.have(4)
        assert loop.time() - before_s == pytest.approx(PATIENCE_S)

    run_virtual(scenario())


def test_a_drain_to_be_done_at_once_waits_for_nobody():
    async def scenario():
        c = case()
        await c.manager.start()
        with c.manager.followers.asking("gateway", NOTHING):
            before_s = asyncio.get_running_loop().time()
            await c.manager.shutdown(0.0)
            assert asyncio.get_running_loop().time() - before_s < 1.0

    run(scenario)
