"""Who deletes placement groups, and when: a manager on fakes, without Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from phalanx.errors import RoleOperationFailedError
from phalanx.roles.manager import InferenceManager
from phalanx.roles.publication import initial_content
from phalanx.routing.roles.registry import RoleRegistry
from phalanx.schema.roles import Ownership
from phalanx.testing.clock import ManualClock
from phalanx.testing.role_fakes import FakeRoleWorld
from phalanx.testing.virtual_time import run_virtual
from tests.roles.manager.case import EngineGroupSpec
from tests.roles.ray_cluster.plans import role_of


class FakeGroup:
    """Tells how many replicas were there when it was deleted."""

    def __init__(self, owner: Ownership, world: FakeRoleWorld) -> None:
        self.owner = owner
        self.deletions: list[int] = []
        self.fails = False
        self._world = world

    async def delete(self) -> None:
        if self.fails:
            raise RoleOperationFailedError("Ray has not removed it")
        self.deletions.append(sum(each.is_up for each in self._world.engines.values()))


def manager_with(world: FakeRoleWorld, *groups: FakeGroup) -> InferenceManager:
    spec = role_of("rollout", EngineGroupSpec(num_replicas=2))
    backends = replace(world.backends, placement_groups=groups)
    registry = RoleRegistry("rollout", "e", initial_content(spec))
    return InferenceManager(spec, backends, registry, ManualClock())


@pytest.mark.parametrize("owner", list(Ownership))
def test_i74_a_manager_deletes_what_it_owns_once_and_when_nothing_runs_there(owner):
    async def main() -> None:
        world = FakeRoleWorld()
        group = FakeGroup(owner, world)
        manager = manager_with(world, group)
        await manager.start()
        await asyncio.gather(manager.shutdown(), manager.shutdown())
        await manager.shutdown()
        assert group.deletions == ([0] if owner is Ownership.MANAGER else [])

    run_virtual(main())


def test_i74_a_group_that_could_not_be_deleted_is_tried_again():
    async def main() -> None:
        world = FakeRoleWorld()
        group = FakeGroup(Ownership.MANAGER, world)
        group.fails = True
        manager = manager_with(world, group)
        await manager.start()
        with pytest.raises(RoleOperationFailedError, match="Ray has not removed it"):
            await manager.shutdown()
        group.fails = False
        await manager.shutdown()
        assert group.deletions == [0]

    run_virtual(main())


def test_i74_a_role_that_has_never_started_gives_its_devices_back():
    async def main() -> None:
        world = FakeRoleWorld()
        group = FakeGroup(Ownership.MANAGER, world)
        await manager_with(world, group).shutdown()
        assert group.deletions == [0]

    run_virtual(main())
