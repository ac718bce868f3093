"""What is known of the devices of a plan on a cluster: where each is, and, of simulated ones, what the
ledger of its machine says. A machine is asked when somebody wants to know.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from phalanx.device_ledger import DeviceLedger, DeviceMemory
from phalanx.errors import PhalanxError, RoleOperationFailedError
from phalanx.roles.control_messages import DeviceStatus
from phalanx.roles.device_view import device_status
from phalanx.roles.ray_cluster.binder import BoundPlacement
from phalanx.roles.ray_cluster.cluster import RayCluster
from phalanx.roles.ray_cluster.ledgers import MachineLedgers
from phalanx.roles.ray_cluster.observed import Place
from phalanx.schema.job_placement import Bundle

LOOK_S = 3.0
"""A machine that is lost answers nothing, and Ray takes its time to say so."""
_REAL = "what is held of real devices is not known here; ask nvidia-smi there"

Answer = tuple[DeviceMemory, ...] | str


class ClusterDevices:
    """Implements `device_view.DevicesElsewhere`."""

    def __init__(
        self,
        cluster: RayCluster,
        bound: BoundPlacement,
        ledgers: MachineLedgers,
        look_s: float = LOOK_S,
    ) -> None:
        self._cluster = cluster
        self._bound = bound
        self._ledgers = ledgers
        self._look_s = look_s
        self._lost: frozenset[Place] = frozenset()

    def has_lost(self, places: Iterable[Place]) -> bool:
        """Whether one of these was lost when `status` was asked for last."""
        return not self._lost.isdisjoint(places)

    async def status(self) -> tuple[DeviceStatus, ...]:
        """Every device that the plan uses, node after node."""
        await self._find_again()
        places = {
            bundle: place
            for name, group in self._bound.groups.items()
            for bundle, place in zip(
                self._bound.plan.group(name).bundles, group.places, strict=True
            )
        }
        nodes = {place.node_id for place in places.values()}
        answers = dict(zip(nodes, await asyncio.gather(*map(self._ask, nodes)), strict=True))
        order = {node.name: at for at, node in enumerate(self._bound.plan.cluster.nodes)}
        return tuple(
            _status(bundle, places[bundle], answers)
            for bundle in sorted(places, key=lambda each: (order[each.node], each.device))
        )

    async def _find_again(self) -> None:
        """Machines may have joined in the place of lost ones that nobody starts a replica on, as the
        trainer's.
        """
        lost: set[Place] = set()
        for name, group in self._bound.groups.items():
            if group.is_there(group.places):
                continue
            # There is none yet, or it does not fit.
            with contextlib.suppress(TimeoutError, PhalanxError):
                async with asyncio.timeout(self._look_s):
                    await self._bound.look_again_in(name)
                    await self._ledgers.have(self._bound.node_ids)
            lost.update(place for place in group.places if not group.is_there([place]))
        self._lost = frozenset(lost)

    async def _ask(self, node_id: str) -> Answer:
        """A machine: its devices in their order, or why nothing is known of them."""
        ledger = self._ledgers.of(node_id)
        if ledger is None:
            return _REAL
        try:
            async with asyncio.timeout(self._look_s):
                return await self._cluster.run_on(node_id, read_ledger, ledger.file)
        except (TimeoutError, RoleOperationFailedError):
            return "its machine does not answer, so that nobody knows what is held there"


def read_ledger(file: str) -> Answer:
    """Runs on the ledger's machine."""
    try:
        return tuple(DeviceLedger(Path(file)).devices())
    except PhalanxError as error:
        return str(error)


def _status(bundle: Bundle, place: Place, answers: Mapping[str, Answer]) -> DeviceStatus:
    answer = answers[place.node_id]
    if isinstance(answer, str):
        return DeviceStatus(bundle.node, bundle.device, place=str(place), unknown=answer)
    return device_status(bundle, answer[place.device], str(place))
