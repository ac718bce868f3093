"""A wake for which the devices have no room fails at once, and leaves a role that can be woken."""

from __future__ import annotations

import pytest

from phalanx.errors import RoleOperationFailedError
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.testing.role_faults import Fault
from tests.roles.manager.case import case, model, run


def test_i92_a_wake_without_room_is_not_asked_for_again_and_changes_nothing():
    async def main() -> None:
        made = case(model())
        await made.manager.start()
        await made.manager.deactivate()
        faults = made.world.faults
        faults.always("resume", Fault.NO_ROOM)
        with pytest.raises(RoleOperationFailedError, match="507 no room"):
            await made.manager.activate()
        assert faults.asked["resume"] == 1
        shown = made.shown()
        assert made.state() is ReplicaState.SLEEPING and not shown.blocked
        faults.always("resume", None)
        await made.manager.activate()
        assert made.state() is ReplicaState.READY
        await made.manager.shutdown()

    run(main)
