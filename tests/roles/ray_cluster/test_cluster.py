"""A plan, its placement groups and its replicas on a real Ray cluster of two machines with devices."""

from __future__ import annotations

import asyncio

import pytest
import ray

from phalanx.errors import ConfigurationError, RoleOperationFailedError
from phalanx.roles.job_sections import LauncherSection
from phalanx.roles.ray_cluster.binder import BoundPlacement, RayBinder
from phalanx.roles.ray_cluster.cluster import RawGroup, bundle
from phalanx.roles.ray_cluster.job import RayJob
from phalanx.roles.ray_cluster.machines import NoRoomError
from phalanx.roles.ray_cluster.observed import PlacementMismatchError
from phalanx.schema.job_placement import PlacementPlan
from phalanx.schema.roles import ModelPlacement, Ownership, PlacementMode
from tests.roles.launching.processes import wait_for_end, watched
from tests.roles.launching.specs import launch_of
from tests.roles.ray_cluster.plans import planned, role_of
from tests.roles.ray_cluster.running import (
    TELLING,
    actors_there,
    all_free,
    bound,
    groups_there,
    have_free,
    healthy,
    launching,
    pids,
    sglang,
)

pytestmark = pytest.mark.long


def addresses(made: BoundPlacement, name: str) -> list[str]:
    return list(map(str, made.groups[name].places))


def test_i73_what_ray_gave_is_known_before_anything_starts(cluster):
    roles = [
        role_of("rollout", sglang(num_replicas=2, ranks_per_replica=2)),
        role_of("teacher", sglang(ranks_per_replica=2)),
    ]

    async def main() -> None:
        before = actors_there()
        async with bound(cluster, planned(roles, 4, 4)) as made:
            assert groups_there() == {"job-rollout", "job-teacher"}
            one, other = sorted(["127.0.0.2", "127.0.0.3"])
            assert sorted(addresses(made, "rollout") + addresses(made, "teacher")) == sorted(
                [f"{one}:{n}" for n in range(4)] + [f"{other}:{n}" for n in range(2)]
            )
            assert [group.owner for group in made.groups.values()] == [Ownership.MANAGER] * 2
            assert made.owned_by(Ownership.MANAGER, "teacher") == (made.groups["teacher"],)
            assert actors_there() == before
        assert not groups_there()

    asyncio.run(main())


def test_i75_a_group_that_does_not_fit_leaves_none_behind(cluster):
    """The cluster shrinks between the look at it and the second group."""
    roles = [role_of("rollout", sglang(num_replicas=4)), role_of("teacher", sglang(num_replicas=4))]
    plan = planned(roles, 4, 4)

    async def main() -> None:
        taken = await cluster.create_group("theirs", [bundle(0.1, "127.0.0.3")] * 4, "PACK", 10.0)
        with pytest.raises(NoRoomError) as caught:
            await RayBinder(cluster, "job", 1.0).bind(plan)
        said = str(caught.value)
        assert "needs 8 devices (4 on node-0, 4 on node-1)" in said
        assert "has 4 free" in said and "0 of 4 on 127.0.0.3" in said and "after 1 s" in said
        with pytest.raises(NoRoomError, match=r"'mine' needs 5 devices.* had 4 free"):
            await cluster.create_group("mine", [bundle(0.1)] * 5, "STRICT_PACK", 0.1)
        assert groups_there() == {"theirs"}
        await cluster.remove_group(taken)
        await all_free(cluster)

    asyncio.run(main())


def test_i75_machines_on_which_no_ledger_can_be_made_keep_no_groups(cluster, tmp_path):
    """Of managers neither, who have not begun to be there."""
    roles = [role_of("rollout", sglang()), role_of("teacher", sglang())]
    plan = planned(roles, 4, memory=1 << 20, trainer_devices=1)
    logs = tmp_path / "logs"
    logs.write_text("a file")

    async def main() -> None:
        with pytest.raises(RoleOperationFailedError, match="logs"):
            await RayJob.on(cluster, "job", LauncherSection(), plan, TELLING, logs)
        assert groups_there() == set()
        await all_free(cluster)

    asyncio.run(main())


def test_i73_a_mismatch_rolls_everything_back(cluster):
    """Two devices are free on the machine, and they are no neighbours."""

    async def main() -> None:
        singles: list[RawGroup] = []
        for number in range(4):
            one = [bundle(0.1, "127.0.0.2")]
            singles.append(await cluster.create_group(f"single-{number}", one, "PACK", 10.0))
        devices = {(await cluster.places(raw))[0].device: raw for raw in singles}
        for device in (0, 2):
            await cluster.remove_group(devices.pop(device))
        await have_free(cluster, "127.0.0.2", 2)
        before = groups_there()
        roles = [role_of("teacher", sglang()), role_of("rollout", sglang(ranks_per_replica=2))]
        plan = planned(roles, 4, 4, names=["127.0.0.3", "127.0.0.2"])
        pinned = planned(roles[1:], 4, names=["127.0.0.2"])
        both = PlacementPlan(
            plan.mode,
            plan.cluster,
            (plan.groups[0], pinned.groups[0]),
            plan.roles,
            (plan.replicas[0], pinned.replicas[0]),
            (),
            plan.phases,
        )
        with pytest.raises(PlacementMismatchError, match=r"rollout/rollout/0 were planned as"):
            await RayBinder(cluster, "job", 10.0).bind(both)
        assert groups_there() == before
        for raw in devices.values():
            await cluster.remove_group(raw)
        await all_free(cluster)

    asyncio.run(main())


def test_i74_a_group_that_is_somebody_elses_is_found_by_its_name_and_stays(cluster):
    plan = planned(
        [role_of("teacher", sglang(num_replicas=2))], 4, external_groups=frozenset({"teacher"})
    )

    async def main() -> None:
        with pytest.raises(ConfigurationError, match="no placement group 'teacher'"):
            await RayBinder(cluster, "job", 1.0).bind(plan)
        small = await cluster.create_group("teacher", [bundle(0.2)], "PACK", 10.0)
        with pytest.raises(ConfigurationError, match="has 1 bundles, and the plan needs 2"):
            await RayBinder(cluster, "job", 1.0).bind(plan)
        await cluster.remove_group(small)
        theirs = await cluster.create_group("teacher", [bundle(0.2)] * 2, "STRICT_PACK", 10.0)
        made = await RayBinder(cluster, "job", 1.0).bind(plan)
        assert groups_there() == {"teacher"}
        assert not made.owned_by(Ownership.MANAGER) and not made.owned_by(Ownership.CONTROLLER)
        assert made.groups["teacher"].owner is Ownership.EXTERNAL
        await cluster.remove_group(theirs)
        await all_free(cluster)

    asyncio.run(main())


def test_i73_bundles_that_are_kept_to_scale_into_are_a_new_replicas(cluster, tmp_path):
    kept = ModelPlacement(Ownership.CONTROLLER, (1, 2, 6, 7), (), None, None)
    roles = [role_of("rollout", sglang(ranks_per_replica=2, placement=kept))]
    plan = planned(roles, 4, 4, mode=PlacementMode.SPLIT)

    async def main() -> None:
        async with (
            bound(cluster, plan) as made,
            launching(cluster, made, tmp_path, TELLING) as launcher,
        ):
            model = plan.roles[0].models[0]
            replicas = [await launcher.launch(launch_of(model, ordinal)) for ordinal in range(2)]
            parts = [part.node for each in replicas for part in each.parts]
            assert [part.devices for part in parts] == [(1, 2), (2, 3)]
            assert len({part.address for part in parts}) == 2
            with pytest.raises(ConfigurationError, match="has no devices in the plan"):
                await launcher.launch(launch_of(model, 2))

    asyncio.run(main())


def test_i73_replicas_run_on_their_own_devices_and_stop_for_certain(cluster, tmp_path):
    roles = [
        role_of("genrm", sglang(ranks_per_replica=2)),
        role_of("rollout", sglang(num_replicas=2, ranks_per_replica=2)),
    ]
    plan = planned(roles, 4, 4, mode=PlacementMode.SPLIT)

    async def main() -> None:
        async with bound(cluster, plan) as made, launching(cluster, made, tmp_path) as launcher:
            (actor,) = made.owned_by(Ownership.CONTROLLER)
            assert not made.owned_by(Ownership.MANAGER)
            model = plan.roles[1].models[0]
            replicas = [await launcher.launch(launch_of(model, ordinal)) for ordinal in range(2)]
            for ordinal, replica in enumerate(replicas):
                places = made.places("rollout", f"rollout/{ordinal}")
                assert replica.url.startswith(f"http://{places[0].address}:")
                await healthy(replica)
            # The first begins in the middle of its machine, the second at the start of another.
            assert [part.node.devices for each in replicas for part in each.parts] == [
                (2, 3),
                (0, 1),
            ]
            assert len({part.node.address for each in replicas for part in each.parts}) == 2
            with watched(*pids(replicas)) as processes:
                await replicas[0].stop(5.0)
                wait_for_end(processes[:1])
                exited = asyncio.ensure_future(replicas[1].exited())
                ray.kill(replicas[1].parts[0].actor._actor)
                assert "its actor has died" in await exited
                await replicas[1].stop(5.0)
                wait_for_end(processes)
            assert not actors_there()
            with pytest.raises(ConfigurationError, match="has no devices in the plan"):
                await launcher.launch(launch_of(model, 2))

    asyncio.run(main())
