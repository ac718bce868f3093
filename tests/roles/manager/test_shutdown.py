"""The end of a manager: everything is stopped, once."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import ConfigurationError, EngineUnavailableError
from phalanx.routing.roles.snapshot import ReplicaState
from tests.roles.manager.case import case, model, run


def test_i84_shutdown_twice_is_once_and_ends_everything_else():
    async def scenario():
        c = case(model(replicas=2))
        await c.manager.start()
        request = c.engine().send(4.0)
        await asyncio.gather(c.manager.shutdown(), c.manager.shutdown())
        await c.manager.shutdown()
        assert request.ended == "finished"
        assert not c.world.running
        assert [c.engine(name).log.count("stop") for name in ("m/0", "m/1")] == [1, 1]
        assert c.registry.snapshot.content.models[0].replicas == ()
        assert c.model_state() is ReplicaState.DEAD
        for operation in ("start", "activate", "drain", "deactivate"):
            with pytest.raises(EngineUnavailableError, match="shut down"):
                await getattr(c.manager, operation)()
        for refused in (
            c.manager.scale("m", 2),
            c.manager.recover("m/0"),
            c.manager.unblock("m/0"),
        ):
            with pytest.raises((EngineUnavailableError, ConfigurationError)):
                await refused

    run(scenario)


def test_i84_shutdown_ends_a_start_that_takes_long():
    async def scenario():
        c = case(model(replicas=2))
        start = asyncio.create_task(c.manager.start())
        await asyncio.sleep(1.0)
        assert len(c.world.running) == 2
        await c.manager.shutdown()
        with pytest.raises(EngineUnavailableError, match="shut down"):
            await start
        assert not c.world.running
        assert c.model_state() is ReplicaState.DEAD

    run(scenario)


def test_i84_a_shutdown_without_time_to_drain_aborts_at_once():
    async def scenario():
        c = case()
        await c.manager.start()
        request = c.engine().send(1000.0)
        before_s = asyncio.get_running_loop().time()
        await c.manager.shutdown(drain_timeout_s=0.0)
        assert asyncio.get_running_loop().time() - before_s < 1.0
        assert request.ended == "aborted"

    run(scenario)
