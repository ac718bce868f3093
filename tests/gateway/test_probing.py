"""Probes on their schedule: together, one of a server at a time, and in time."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.clock import SystemClock
from phalanx.gateway.alarm import Alarm
from phalanx.gateway.leases import LeaseTimer
from phalanx.gateway.pool import Pool
from phalanx.gateway.probing import Prober
from phalanx.routing.endpoint import Endpoint, Scheme
from phalanx.routing.pool_policy import PoolPolicy
from phalanx.routing.pool_registry import PoolRegistry
from phalanx.routing.publisher import Publisher
from phalanx.routing.registration import Probe
from phalanx.routing.snapshot import ServerState
from tests.gateway.policy_servers import run


class ScriptedCheck:
    """Each probe waits to be answered by the test."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[str, asyncio.Future]] = asyncio.Queue()
        self.forgotten: asyncio.Queue[str] = asyncio.Queue()
        self.closed = False

    async def check(self, server):
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((server.server_id, answer))
        return await answer

    async def forget(self, server_id):
        self.forgotten.put_nowait(server_id)

    async def close(self):
        self.closed = True


class Case:
    def __init__(self, **times: float) -> None:
        policy = PoolPolicy(**{"probe_interval_s": 0.01, "down_interval_s": 0.01, **times})
        clock = SystemClock()
        self.registry = PoolRegistry(Publisher("e"), clock, policy)
        self.pool = Pool(self.registry, clock)
        self.check = ScriptedCheck()
        self.prober = Prober(self.registry, clock, {Scheme.GRPC: self.check})
        self.leases = LeaseTimer(self.registry, clock)

    def add(self, port: int) -> str:
        return self.registry.register_managed("m", Endpoint.parse(f"a:{port}")).server_id

    def state(self, server_id: str) -> ServerState:
        return self.pool.snapshot.by_id[server_id].state

    async def until(self, server_id: str, state: ServerState) -> None:
        while self.state(server_id) is not state:
            await self.pool.watch(self.pool.snapshot.revision, 30.0)

    async def cancelled(self, task: asyncio.Task) -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_servers_are_probed_together_and_each_by_one_probe_at_a_time():
    async def scenario():
        case = Case()
        first, second = case.add(1), case.add(2)
        task = asyncio.create_task(case.prober.run())
        probes = dict([await case.check.asked.get(), await case.check.asked.get()])
        assert probes.keys() == {first, second}
        probes[second].set_result((Probe.HEALTHY, ""))
        await case.until(second, ServerState.READY)
        for _ in range(3):
            server_id, answer = await case.check.asked.get()
            assert server_id == second, "the first one's probe still runs"
            answer.set_result((Probe.HEALTHY, ""))
        probes[first].set_result((Probe.UNREACHABLE, "gone"))
        await case.until(first, ServerState.UNHEALTHY)
        await case.cancelled(task)
        assert case.check.closed

    run(scenario())


def test_a_probe_that_takes_too_long_has_failed():
    async def scenario():
        case = Case(probe_timeout_s=0.02)
        server_id = case.add(1)
        task = asyncio.create_task(case.prober.run())
        _, answer = await case.check.asked.get()
        await case.until(server_id, ServerState.UNHEALTHY)
        assert answer.cancelled()
        assert case.pool.snapshot.by_id[server_id].detail == "no answer within 0.02 s"
        await case.cancelled(task)

    run(scenario())


def test_a_server_that_is_added_is_probed_at_once_and_one_that_is_gone_is_forgotten():
    async def scenario():
        case = Case(probe_interval_s=1000.0)
        task = asyncio.create_task(case.prober.run())
        await asyncio.sleep(0)
        server_id = case.add(1)
        _, answer = await case.check.asked.get()
        answer.set_result((Probe.HEALTHY, ""))
        await case.until(server_id, ServerState.READY)
        case.registry.remove(server_id)
        assert await case.check.forgotten.get() == server_id
        await case.cancelled(task)

    run(scenario())


def test_a_request_that_found_no_connection_brings_the_next_probe_forward():
    async def scenario():
        case = Case(probe_interval_s=1000.0)
        server_id = case.add(1)
        task = asyncio.create_task(case.prober.run())
        _, answer = await case.check.asked.get()
        answer.set_result((Probe.HEALTHY, ""))
        await case.until(server_id, ServerState.READY)
        case.pool.connect_failed(server_id)
        _, answer = await case.check.asked.get()
        answer.set_result((Probe.HEALTHY, ""))
        await case.until(server_id, ServerState.READY)
        await case.cancelled(task)

    run(scenario())


def test_a_request_that_was_lost_brings_the_next_probe_forward_and_one_that_was_not_does_not():
    async def scenario():
        case = Case(probe_interval_s=1000.0)
        server_id = case.add(1)
        task = asyncio.create_task(case.prober.run())
        _, answer = await case.check.asked.get()
        answer.set_result((Probe.HEALTHY, ""))
        await case.until(server_id, ServerState.READY)
        for code in ("OK", "INVALID_ARGUMENT", "UNAVAILABLE"):
            assert case.check.asked.empty()
            with case.pool.acquire("m", Scheme.GRPC) as ticket:
                ticket.outcome(code)
            due_s = case.registry.next_probe_s()
            assert (due_s < asyncio.get_running_loop().time() + 1) == (code == "UNAVAILABLE")
        _, answer = await case.check.asked.get()
        assert case.state(server_id) is ServerState.READY, "it may have been the request's fault"
        answer.set_result((Probe.UNREACHABLE, "gone"))
        await case.until(server_id, ServerState.UNHEALTHY)
        await case.cancelled(task)

    run(scenario())


def test_a_check_that_raises_has_failed_and_the_other_servers_are_probed_on(caplog):
    async def scenario():
        case = Case()
        first, second = case.add(1), case.add(2)
        task = asyncio.create_task(case.prober.run())
        probes = dict([await case.check.asked.get(), await case.check.asked.get()])
        probes[first].set_exception(ValueError("of no kind that was thought of"))
        await case.until(first, ServerState.UNHEALTHY)
        assert case.pool.snapshot.by_id[first].detail.endswith("of no kind that was thought of")
        probes[second].set_result((Probe.HEALTHY, ""))
        await case.until(second, ServerState.READY)
        again = {(await case.check.asked.get())[0] for _ in range(2)}
        assert again == {first, second}
        await case.cancelled(task)

    run(scenario())
    assert "of no kind" in caplog.text


def test_leases_end_on_time_without_anybody_asking():
    async def scenario():
        case = Case(lease_s=0.02, heartbeat_s=0.01, forget_s=0.02)
        task = asyncio.create_task(case.leases.run())
        await asyncio.sleep(0)
        server_id = case.registry.register_self("m", Endpoint.parse("a:1")).server_id
        await case.until(server_id, ServerState.UNHEALTHY)
        while case.pool.snapshot.servers:
            await case.pool.watch(case.pool.snapshot.revision, 30.0)
        await case.cancelled(task)

    run(scenario())


def test_an_alarm_ends_when_it_is_woken_also_before_the_wait():
    async def scenario():
        clock = SystemClock()
        alarm = Alarm(clock)
        alarm.wake()
        await alarm.wait(None)
        asyncio.get_running_loop().call_soon(alarm.wake)
        await alarm.wait(None)
        await alarm.wait(clock.monotonic_s() - 1.0)

    run(scenario())
