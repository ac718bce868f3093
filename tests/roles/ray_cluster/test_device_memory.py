"""What a job's status says of devices on a cluster, where machines answer and where they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from phalanx.device_ledger import MIB, DeviceLedger
from phalanx.errors import RoleOperationFailedError
from phalanx.roles.ray_cluster.binder import BoundPlacement
from phalanx.roles.ray_cluster.device_memory import ClusterDevices
from phalanx.roles.ray_cluster.host import Ledger
from phalanx.roles.ray_cluster.observed import Place
from phalanx.schema.job_placement import ACTOR_GROUP
from phalanx.schema.roles import PlacementMode
from tests.roles.ray_cluster.plans import planned, role_of
from tests.roles.ray_cluster.running import sglang


@dataclass
class Machines:
    """Runs what it is asked to, but on those that were lost."""

    lost: dict[str, Exception]

    async def run_on(self, node_id: str, act: Callable[[str], object], argument: str) -> object:
        if node_id in self.lost:
            raise self.lost[node_id]
        return act(argument)


@dataclass
class Ledgers:
    files: dict[str, str]

    def of(self, node_id: str) -> Ledger | None:
        file = self.files.get(node_id)
        return None if file is None else Ledger(file, 4, 100 * MIB)

    async def have(self, node_ids: frozenset[str]) -> None:
        """Those of tests are there."""


@dataclass
class Group:
    """`lost` are node ids, and `joined` the place that a new machine has in the plan, if one has come."""

    places: tuple[Place, ...]
    lost: tuple[str, ...] = ()
    joined: Place | None = None

    def is_there(self, places: Sequence[Place]) -> bool:
        return not any(place.node_id in self.lost for place in places)

    async def look_again(self, check: Callable[..., None]) -> None:
        if self.joined is None:
            raise RoleOperationFailedError("no machine has joined")
        self.places = tuple(
            self.joined if place.node_id in self.lost else place for place in self.places
        )


PLACES = (Place(0, "x", "10.0.0.7", 2), Place(1, "y", "10.0.0.8", 1))


def devices(machines: Machines, ledgers: Ledgers, group: Group | None = None) -> ClusterDevices:
    """Of two nodes with a device each, which are the third and the second of their machines."""
    plan = planned([role_of("rollout", sglang(num_replicas=2))], 1, 1, mode=PlacementMode.SPLIT)
    bound = BoundPlacement(plan, {ACTOR_GROUP: group or Group(PLACES)})
    return ClusterDevices(machines, bound, ledgers)


def test_each_machine_tells_of_its_own(tmp_path):
    ledger = DeviceLedger.create(tmp_path / "x", 4, 100 * MIB)
    ledger.take(2, "rollout/rollout/0", "weights", 7 * MIB)
    files = {"x": str(tmp_path / "x"), "y": str(tmp_path / "missing")}
    first, second = asyncio.run(devices(Machines({}), Ledgers(files)).status())
    assert (first.place, first.budget_bytes, first.peak_bytes) == ("10.0.0.7:2", 100 * MIB, 7 * MIB)
    assert [(one.owner, one.num_bytes) for one in first.held] == [("rollout/rollout/0", 7 * MIB)]
    assert first.unknown is None
    assert second.place == "10.0.0.8:1" and second.unknown and second.budget_bytes is None


@pytest.mark.parametrize("error", [RoleOperationFailedError("it was lost"), TimeoutError()])
def test_a_lost_machine_is_told_of_in_words(tmp_path, error):
    DeviceLedger.create(tmp_path / "x", 4, 100 * MIB)
    files = {"x": str(tmp_path / "x"), "y": "anywhere"}
    first, second = asyncio.run(devices(Machines({"y": error}), Ledgers(files)).status())
    assert first.unknown is None
    assert second.unknown == "its machine does not answer, so that nobody knows what is held there"


def test_of_real_devices_it_says_where_they_are_and_that_nothing_is_known():
    first, second = asyncio.run(devices(Machines({}), Ledgers({})).status())
    assert (first.place, second.place) == ("10.0.0.7:2", "10.0.0.8:1")
    assert {each.unknown for each in (first, second)} == {
        "what is held of real devices is not known here; ask nvidia-smi there"
    }


def test_a_lost_machine_is_looked_for_again_though_nobody_starts_anything_there():
    group = Group(PLACES, lost=("y",))
    found = devices(Machines({}), Ledgers({}), group)
    assert not found.has_lost(PLACES)
    asyncio.run(found.status())
    assert found.has_lost(PLACES) and not found.has_lost(PLACES[:1])
    group.joined = Place(1, "z", "10.0.0.9", 0)
    assert [each.place for each in asyncio.run(found.status())] == ["10.0.0.7:2", "10.0.0.9:0"]
    assert not found.has_lost(group.places)
