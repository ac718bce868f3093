"""Starts replicas on the machines of a Ray cluster, in the bundles that a plan gave them; any other
gets a placement group of its own, which ends with it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from phalanx.errors import ConfigurationError
from phalanx.roles.contracts import EngineCallError, ReplicaLaunch
from phalanx.roles.engine_command import EngineSpan
from phalanx.roles.placement.reservations import shares
from phalanx.roles.ray_cluster.binder import BoundPlacement, find_room
from phalanx.roles.ray_cluster.cluster import ACTOR_CPUS, RayCluster, bundle
from phalanx.roles.ray_cluster.groups import RayPlacementGroup
from phalanx.roles.ray_cluster.host import HostSettings, Order, Reserved
from phalanx.roles.ray_cluster.host_actor import HostActor
from phalanx.roles.ray_cluster.ledgers import MachineLedgers
from phalanx.roles.ray_cluster.observed import NodePart, parts_of
from phalanx.roles.ray_cluster.replica import RayReplica, RunningPart
from phalanx.schema.roles import Ownership, PlacementMode

EXTRA_S = 10.0
CLOSE_GRACE_S = 10.0


@dataclass(frozen=True)
class Site:
    """Where a replica is to run: in this group, on these machines. `extra`: the group is its own."""

    group: RayPlacementGroup
    parts: tuple[NodePart, ...]
    extra: bool


class RayLauncher:
    """Implements `contracts.Launcher`. `job` begins the names of the groups that are made here."""

    def __init__(
        self,
        cluster: RayCluster,
        bound: BoundPlacement | None,
        settings: HostSettings,
        job: str,
        ledgers: MachineLedgers | None = None,
        *,
        extra_s: float = EXTRA_S,
    ) -> None:
        """Without `bound`, each replica gets a group of its own, for which the cluster has `extra_s` to
        have room. `ledgers`: devices are simulated.
        """
        self._cluster = cluster
        self._bound = bound
        self._settings = settings
        self._job = job
        self._ledgers = ledgers
        self._extra_s = extra_s
        self._shares = {} if bound is None else shares(bound.plan)
        self._running: set[RayReplica] = set()

    async def launch(self, launch: ReplicaLaunch) -> RayReplica:
        """Returns when its processes run, before they are healthy. Raises `EngineCallError` where
        the cluster is in the way, and `ConfigurationError` for what can never start.
        """
        site = await self._site(launch)
        async with AsyncExitStack() as undo:
            if site.extra:
                undo.push_async_callback(site.group.delete)
            try:
                replica = await self._start(launch, site, undo)
            except BaseException:
                await asyncio.shield(undo.pop_all().aclose())
                raise
            undo.pop_all()
        self._running.add(replica)
        return replica

    @property
    def num_running(self) -> int:
        """Replicas of which something is left."""
        return len(self._running)

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Stop whatever still runs. Any number of times, also again with less patience."""
        await asyncio.gather(*(replica.stop(grace_s) for replica in tuple(self._running)))

    async def _site(self, launch: ReplicaLaunch) -> Site:
        bound = self._bound
        places = None if bound is None else bound.places(launch.role, launch.engine_id)
        if bound is not None and places is not None:
            group = bound.group_of(launch.role)
            if not group.is_there(places):
                await bound.look_again(launch.role)
                await self._have_ledgers(bound.node_ids)
                places = bound.places(launch.role, launch.engine_id) or places
            if group.is_there(places):
                return Site(group, parts_of(places), extra=False)
            if group.owner is not Ownership.MANAGER:
                raise EngineCallError(
                    f"a machine of placement group {group.name!r}, in which {launch.engine_id} has"
                    " its devices, is lost; have one of that address join the cluster",
                    uncertain=False,
                )
        if bound is not None and bound.plan.mode is not PlacementMode.DECOUPLED:
            raise ConfigurationError(
                f"{launch.engine_id} has no devices in the plan, and its role shares a placement"
                " group; plan more replicas"
            )
        return await self._extra(launch)

    async def _extra(self, launch: ReplicaLaunch) -> Site:
        """A group for one replica alone, wherever the cluster has room."""
        nodes, ranks = launch.group.nodes_per_replica, launch.group.ranks_per_replica
        if ranks % nodes:
            raise ConfigurationError(
                f"{launch.engine_id}: ranks={ranks} cannot be cut into nodes={nodes} equal parts;"
                " give a multiple"
            )
        wanted = {f"machine {number + 1}": ranks // nodes for number in range(nodes)}
        machines = await find_room(self._cluster, wanted, self._extra_s)
        raw = await self._cluster.create_group(
            f"{self._job}-{launch.role}-{launch.engine_id}.{launch.generation}",
            [
                bundle(2 * ACTOR_CPUS, machine.address)
                for machine in machines.values()
                for _ in range(ranks // nodes)
            ],
            "STRICT_PACK" if nodes == 1 else "PACK",
            self._extra_s,
        )
        group = RayPlacementGroup(self._cluster, raw, Ownership.MANAGER, ())
        try:
            found = await self._cluster.places(raw)
        except BaseException:
            await asyncio.shield(group.delete())
            raise
        in_order = sorted(found, key=lambda place: (place.address, place.device))
        return Site(group, parts_of(in_order), extra=True)

    async def _start(self, launch: ReplicaLaunch, site: Site, undo: AsyncExitStack) -> RayReplica:
        share = 1.0 if site.extra else self._shares.get(launch.role, 1.0)
        parts = []
        for node in site.parts:
            actor = HostActor(site.group.raw, node.index, share, self._settings, node.address)
            parts.append(RunningPart(self._cluster, node, actor))
            undo.push_async_callback(parts[-1].discard)
        await self._have_ledgers(node.node_id for node in site.parts)
        reserved = await parts[0].actor.reserve(launch)
        orders = self._orders(launch, site.parts, reserved)
        starting = [
            part.actor.start(order, reserved.address)
            for part, order in zip(parts, orders, strict=True)
        ]
        for part, pid in zip(parts, await asyncio.gather(*starting), strict=True):
            part.pid = pid
        own = site.group if site.extra else None
        return RayReplica(reserved.address, parts, own, self._running.discard)

    async def _have_ledgers(self, node_ids: Iterable[str]) -> None:
        if self._ledgers is not None:
            await self._ledgers.have(node_ids)

    def _orders(
        self, launch: ReplicaLaunch, nodes: Sequence[NodePart], reserved: Reserved
    ) -> Iterator[Order]:
        key = secrets.token_hex(32)
        for rank, node in enumerate(nodes):
            span = EngineSpan(len(nodes), rank, reserved.meeting, key) if len(nodes) > 1 else None
            ledger = None if self._ledgers is None else self._ledgers.of(node.node_id)
            yield Order(launch, node.devices, ledger, span)
