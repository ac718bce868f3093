"""A call that takes memory and was given up may come whenever it likes: it is not done after a later
one. Found by the model check, and shown plainly here.
"""

from __future__ import annotations

import asyncio

import httpx
import pytest

from phalanx.errors import InvalidRequestError, RoleOperationFailedError, RoleOperationRefusedError
from phalanx.roles.contracts import ALL_TAGS
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.server.operations.call_order import CallOrder
from phalanx.testing.role_fakes import FakeRoleWorld
from phalanx.testing.role_faults import Faults
from tests.roles.manager.case import case, model, run

LATE_S = 60.0


class LateResumes(Faults):
    """So many calls of `resume` are answered by nobody, and done long afterwards."""

    num_late = 0

    async def strike(self, point, act, *, crash, latency_s=0.01) -> None:
        if point != "resume" or self.num_late == 0:
            return await super().strike(point, act, crash=crash, latency_s=latency_s)
        self.num_late -= 1
        asyncio.get_running_loop().call_later(LATE_S, act)
        await asyncio.get_running_loop().create_future()


def test_d9_memory_that_was_given_back_is_not_taken_by_a_call_of_before():
    async def scenario():
        faults = LateResumes()
        c = case(model(), world=FakeRoleWorld(keeps_weights=True, faults=faults))
        await c.manager.start()
        await c.manager.deactivate()
        faults.num_late = 1
        await c.manager.activate()
        await c.manager.deactivate()
        await asyncio.sleep(2 * LATE_S)
        assert c.engine().held == frozenset()
        await c.manager.shutdown()

    run(scenario)


def test_d9_nor_where_nobody_has_heard_of_any_that_was_done():
    async def scenario():
        faults = LateResumes()
        c = case(model(), world=FakeRoleWorld(keeps_weights=True, faults=faults))
        await c.manager.start()
        await c.manager.deactivate()
        faults.num_late = 100
        with pytest.raises(RoleOperationFailedError):
            await c.manager.activate()
        with pytest.raises(RoleOperationRefusedError, match="blocked"):
            await c.manager.deactivate()
        await c.manager.unblock("m/0")
        assert set(c.manager.residency().values()) == {frozenset()}
        await asyncio.sleep(2 * LATE_S)
        assert c.engine().held == frozenset()
        faults.num_late = 0
        await c.manager.activate()
        assert c.engine().held == ALL_TAGS
        await c.manager.shutdown()

    run(scenario)


def test_a_manager_numbers_the_calls_that_move_memory_and_a_server_does_none_after_a_later_one():
    headers: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        headers.append(request.headers["x-phalanx-call"])
        return httpx.Response(200, content=b"null")

    async def scenario():
        for _ in range(2):
            transport = httpx.MockTransport(answer)
            async with SGLangEngine("http://127.0.0.1:1", transport=transport) as engine:
                await engine.release(ALL_TAGS)
                await engine.resume(ALL_TAGS)

    asyncio.run(scenario())
    first, second, *others = headers
    order = CallOrder()
    order.check(None)
    order.check(second)
    order.check(second)
    with pytest.raises(InvalidRequestError, match="comes after a later call"):
        order.check(first)
    for header in others:
        order.check(header)
    with pytest.raises(InvalidRequestError):
        order.check(second)


@pytest.mark.parametrize("header", ["", "a", "a/", "/1", "a/-1", "a/x", "a" * 200 + "/1"])
def test_what_is_no_number_of_a_call_is_refused(header):
    with pytest.raises(InvalidRequestError, match="CALLER/NUMBER"):
        CallOrder().check(header)
