"""An `EngineHost` on another machine, called as if it were here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from phalanx.errors import ConfigurationError
from phalanx.roles.contracts import EngineCallError, ReplicaLaunch
from phalanx.roles.engine_command import ListenAddress
from phalanx.roles.ray_cluster.address import first_line
from phalanx.roles.ray_cluster.cluster import ACTOR_CPUS, RawGroup
from phalanx.roles.ray_cluster.host import EngineHost, HostSettings, Order, Refused, Reserved

T = TypeVar("T")
_PAUSE_S = 0.1


class HostLostError(EngineCallError):
    """The actor has died, or its machine was lost."""

    def __init__(self, message: str) -> None:
        super().__init__(message, uncertain=False, gone=True)


class HostActor:
    """Ends with the process that made it, which is its owner. Calls raise `HostLostError`."""

    def __init__(
        self, group: RawGroup, index: int, share: float, settings: HostSettings, address: str
    ) -> None:
        """In a bundle of a group, of whose device it reserves a share; it may start later."""
        actor = ray.remote(EngineHost).options(
            num_cpus=ACTOR_CPUS,
            num_gpus=share,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group.handle, index),
        )
        self._actor: Any = actor.remote(settings, address)

    async def reserve(self, launch: ReplicaLaunch) -> Reserved:
        """Raises `ConfigurationError` where there are no such ports."""
        answer: Reserved | Refused = await _answer(self._actor.reserve.remote(launch))
        return _accepted(answer)

    async def start(self, order: Order, address: ListenAddress) -> int:
        """Raises `ConfigurationError` for what can never start."""
        answer: int | Refused = await _answer(self._actor.start.remote(order, address))
        return _accepted(answer)

    async def exited(self) -> str:
        """How its process has ended by itself."""
        while True:
            try:
                reason: str = await self._actor.exited.remote()
                return reason
            except ActorUnavailableError:
                await asyncio.sleep(_PAUSE_S)  # Ray does not know yet whether it is lost
            except RayError as error:
                raise HostLostError(first_line(error)) from error

    async def stop(self, grace_s: float) -> None:
        await _answer(self._actor.stop.remote(grace_s))

    async def kill(self) -> None:
        """Returns when it answers no more."""
        ray.kill(self._actor)
        try:
            while True:
                await self._actor.ping.remote()
                await asyncio.sleep(_PAUSE_S)
        except RayError:
            return


async def _answer(asked: Awaitable[T]) -> T:
    try:
        return await asked
    except RayError as error:
        raise HostLostError(first_line(error)) from error


def _accepted(answer: T | Refused) -> T:
    if isinstance(answer, Refused):
        raise ConfigurationError(answer.reason)
    return answer
