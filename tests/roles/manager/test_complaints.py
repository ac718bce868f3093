"""What users report of other managers beside those complaints that have their own places."""

from __future__ import annotations

import pytest

from phalanx.errors import RoleOperationRefusedError
from phalanx.roles.contracts import Tag
from phalanx.routing.roles.snapshot import ReplicaState
from tests.roles.manager.case import Case, case, model, run


def versions_served(c: Case) -> list[int]:
    """Of every replica that served in any snapshot, in the snapshots' order."""
    return [
        int(replica.weight_version)
        for snapshot in c.snapshots
        for each in snapshot.content.models
        for replica in each.replicas
        if replica.serves
    ]


def test_complaint_miles_2244_a_failover_takes_no_version_back():
    async def scenario():
        fields = {"weight_source": "dcs", "fault_tolerance_enabled": True, "elastic_enabled": True}
        c = case(model(replicas=2, **fields))
        await c.manager.start()
        for version in (3, 10):
            await c.manager.broadcast("m", f"/v/{version}", version)
            for name in ("m/0", "m/1"):
                c.engine(name).crash()
                await c.until(lambda name=name: c.state(name) is ReplicaState.DEAD)
                with pytest.raises(RoleOperationRefusedError, match="not newer"):
                    await c.manager.broadcast("m", "/v/2", 2)
                assert await c.manager.register_broadcast("m") == version
                await c.until(lambda name=name: c.state(name) is ReplicaState.READY)
        await c.manager.scale("m", 3)
        served = versions_served(c)
        assert served == sorted(served)
        assert {served[0], served[-1]} == {3, 10}
        assert {engine.version for engine in c.world.running} == {"10"}
        assert [snapshot.revision for snapshot in c.snapshots] == list(range(len(c.snapshots)))
        await c.manager.shutdown()

    run(scenario)


def test_complaint_primerl_2841_requests_have_ended_before_the_engine_is_paused():
    """A pause first would cut off what a drain is to wait for."""

    async def scenario():
        c = case()
        await c.manager.start()
        requests = [c.engine().send(duration_s) for duration_s in (2.0, 9.0)]
        seen = []

        def watch(point, act, **more):
            if point in ("pause", "abort_all", "release"):
                seen.append((point, [request.ended for request in requests], c.state()))
            return strike(point, act, **more)

        strike, c.world.faults.strike = c.world.faults.strike, watch
        await c.manager.deactivate()
        finished = ["finished", "finished"]
        assert seen == [
            ("pause", finished, ReplicaState.DRAINING),
            ("release", finished, ReplicaState.DRAINING),
        ]
        assert Tag.WEIGHTS not in c.engine().held
        await c.manager.shutdown()

    run(scenario)
