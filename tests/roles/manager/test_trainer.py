"""Weights that a trainer puts into the replicas itself: told to the manager, or noticed by it."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.errors import RoleOperationRefusedError
from phalanx.roles.contracts import ALL_TAGS
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.testing.role_fakes import FakeRoleWorld
from tests.roles.manager.case import case, model, run


def trained(source="local", **fields):
    return model(weight_source=source, **fields)


def world():
    return FakeRoleWorld(says=False)


def test_a_trainer_that_pushes_weights_is_believed_when_every_serving_replica_has_them():
    async def scenario():
        c = case(trained("actor", replicas=2), health_interval_s=1000.0)
        await c.manager.start()
        with pytest.raises(RoleOperationRefusedError, match="'1'.*not there"):
            await c.manager.confirm_weights("m", "1")
        c.engine("m/0").put_weights("1")
        await c.manager.confirm_weights("m", "1")
        assert (c.state("m/0"), c.state("m/1")) == ("ready", "starting")
        c.engine("m/1").put_weights("2")
        with pytest.raises(RoleOperationRefusedError, match="m/0 says '1'"):
            await c.manager.confirm_weights("m", "2")
        c.engine("m/0").put_weights("2")
        await c.manager.confirm_weights("m", "2")
        assert (c.state("m/0"), c.state("m/1")) == ("ready", "ready")
        await c.manager.shutdown()

    run(scenario)


def test_a_trainer_need_not_tell_the_manager():
    async def scenario():
        c = case(trained("actor", replicas=2), world=world(), health_interval_s=5.0)
        await c.manager.start()
        for name in ("m/0", "m/1"):
            c.engine(name).put_weights("1")
        await c.until(lambda: c.state("m/0") is c.state("m/1") is ReplicaState.READY)
        for name in ("m/0", "m/1"):
            c.engine(name).put_weights("2")
        await c.until(lambda: c.registry.snapshot.content.models[0].weight_version == "2")
        assert c.shown("m/0").weight_version == "2"
        await c.manager.deactivate()
        await c.manager.activate()
        await asyncio.sleep(60.0)
        assert c.state("m/0") is ReplicaState.ONLOADING
        for name in ("m/0", "m/1"):
            c.engine(name).put_weights("3")
        await c.until(lambda: c.state("m/0") is c.state("m/1") is ReplicaState.READY)
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("says", [False, True])
def test_what_an_engine_says_of_weights_that_were_lost_before_anybody_noticed_them_is_not_believed(
    says,
):
    async def scenario():
        c = case(trained("actor"), world=FakeRoleWorld(says=says), health_interval_s=5.0)
        await c.manager.start()
        c.engine().put_weights("1")
        await c.until(lambda: c.state() is ReplicaState.READY)
        c.engine().put_weights("2")
        await c.manager.deactivate()
        await c.manager.activate()
        await asyncio.sleep(60.0)
        assert c.state() is ReplicaState.ONLOADING
        assert c.registry.snapshot.content.models[0].weight_version == "1"
        await c.manager.activate()
        assert c.state() is ReplicaState.ONLOADING
        c.engine().put_weights("3")
        await c.until(lambda: c.state() is ReplicaState.READY)
        await c.manager.shutdown()

    run(scenario)


def test_a_trainers_word_is_of_the_weights_that_were_there_when_it_was_given():
    async def scenario():
        c = case(trained("actor"), world=world(), health_interval_s=1000.0)
        await c.manager.start()
        c.engine().put_weights("1")
        await c.manager.confirm_weights("m", "1")
        sleeping = asyncio.create_task(c.manager.deactivate())
        waking = asyncio.create_task(c.manager.activate())
        await asyncio.sleep(0)
        c.engine().put_weights("2")
        with pytest.raises(RoleOperationRefusedError, match="'2'.*not there"):
            await c.manager.confirm_weights("m", "2")
        await asyncio.gather(sleeping, waking)
        assert c.state() is ReplicaState.ONLOADING
        # The same again is no old word.
        c.engine().put_weights("2")
        await c.manager.confirm_weights("m", "2")
        assert c.state() is ReplicaState.READY
        await c.manager.shutdown()

    run(scenario)


@pytest.mark.parametrize("source", ["local", "actor"])
def test_weights_that_somebody_else_has_released_are_brought_again(source):
    async def scenario():
        c = case(trained(source), world=FakeRoleWorld(says=True), health_interval_s=5.0)
        await c.manager.start()
        if source == "actor":
            c.engine().put_weights("1")
            await c.until(lambda: c.state() is ReplicaState.READY)
        await c.engine().pause()
        await c.engine().release(ALL_TAGS)
        await c.until(lambda: c.state() is ReplicaState.DRAINING)
        assert c.shown().weight_version is None
        await c.manager.activate()
        if source == "actor":
            assert c.state() is ReplicaState.ONLOADING
            c.engine().put_weights("2")
            await c.until(lambda: c.state() is ReplicaState.READY)
        assert c.engine().serves
        await c.manager.shutdown()

    run(scenario)


def test_a_version_that_is_not_everywhere_is_looked_for_without_a_word():
    async def scenario():
        c = case(trained("actor", replicas=2), health_interval_s=5.0)
        await c.manager.start()
        c.engine("m/0").put_weights("1")
        c.engine("m/1").put_weights("0")
        await c.manager.confirm_weights("m", "1")
        before = c.events.last_number
        await asyncio.sleep(100.0)
        assert c.events.last_number == before
        assert (c.state("m/0"), c.state("m/1")) == ("ready", "starting")
        c.engine("m/1").put_weights("1")
        await c.until(lambda: c.state("m/1") is ReplicaState.READY)
        await c.manager.shutdown()

    run(scenario)


def test_d13_complaint_relax_293_where_weights_come_from_is_said_by_each_model_whatever_its_role():
    async def scenario():
        c = case(model("fixed"), trained("actor", name="moving"), health_interval_s=1000.0)
        await c.manager.start()
        c.engine("moving/0").put_weights("1")
        await c.manager.confirm_weights("moving", "1")
        assert c.model_state("fixed") is c.model_state("moving") is ReplicaState.READY
        assert c.shown("fixed/0").weight_version is None
        assert c.shown("moving/0").weight_version == "1"
        await c.manager.shutdown()

    run(scenario)
