"""A model's router, where it has one: which replicas it may know, added and removed for certain."""

from __future__ import annotations

import asyncio

from phalanx.roles.calls import RETRY_S, Deadline, attempt, insist
from phalanx.roles.contracts import EngineCallError, ModelRouter, OpenRouter
from phalanx.roles.replica import Replica
from phalanx.schema.roles import InferenceModelSpec


class RouterLink:
    """Does nothing for a model without a router."""

    def __init__(
        self, role: str, model: InferenceModelSpec, open_router: OpenRouter, timeout_s: float
    ) -> None:
        self._role = role
        self._model = model
        self._open_router = open_router
        self._timeout_s = timeout_s
        self._router: ModelRouter | None = None

    @property
    def url(self) -> str | None:
        return None if self._router is None else self._router.url

    async def open(self) -> bool:
        """Whether it was opened now. Raises `EngineCallError`."""
        if not self._model.needs_router or self._router is not None:
            return False
        self._router = await attempt(
            lambda: self._open_router(self._role, self._model),
            f"the router of model {self._model.name!r}",
            self._timeout_s,
        )
        return True

    async def close(self) -> None:
        router, self._router = self._router, None
        if router is not None:
            await attempt(router.close, f"close the router {router.url}", self._timeout_s)

    async def add(self, replica: Replica) -> None:
        """Have the router send it requests. Raises `EngineCallError`."""
        router = self._router
        if router is None:
            return
        deadline = Deadline(self._timeout_s)
        what = f"{replica.engine_id}: add it to the router {router.url}"
        handle = replica.handle
        while True:
            replica.routed = True
            try:
                await attempt(
                    lambda: router.add(handle.url, replica.launch.group, handle.bootstrap_port),
                    what,
                    max(deadline.left_s, 1.0),
                )
                return
            except EngineCallError:
                if deadline.left_s <= RETRY_S:
                    raise
            await self.remove(replica, deadline)
            await asyncio.sleep(RETRY_S)

    async def remove(self, replica: Replica, deadline: Deadline | None = None) -> None:
        """Have the router send it nothing any more. Raises `EngineCallError`."""
        router = self._router
        if router is not None and replica.routed:
            await insist(
                lambda: router.remove(replica.handle.url),
                f"{replica.engine_id}: remove it from the router {router.url}",
                deadline or Deadline(self._timeout_s),
            )
        replica.routed = False
