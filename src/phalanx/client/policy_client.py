"""The client of a policy for programs without an event loop: `AsyncPolicyClient`, waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import closing
from typing import Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.client.async_policy_client import AsyncPolicyClient
from phalanx.client.policy_settings import PolicySettings
from phalanx.client.roles.loop_thread import refuse_inside_a_loop
from phalanx.errors import EngineUnavailableError
from phalanx.schema.observation import Actions, Observation
from phalanx.wire.robot_inference import InferenceAnswer

T = TypeVar("T")


class PolicyClient:
    """Talks to `model` at `address` (HOST:PORT); "" is the only model that is served there.

    Closed by `close` or at the end of `with`. It runs one request at a time, threads wait for one
    another; `AsyncPolicyClient` runs many. Not for use inside a running event loop.
    """

    def __init__(
        self, address: str, *, model: str = "", settings: PolicySettings | None = None
    ) -> None:
        refuse_inside_a_loop("PolicyClient")
        self._turn = threading.Lock()
        self._loop = asyncio.Runner()
        self._closed = False
        try:
            self._client = self._loop.run(_made(address, model, settings))
        except BaseException:
            self._loop.close()
            raise

    def act(
        self,
        images: Mapping[str, NDArray[np.uint8]] | None = None,
        state: ArrayLike | None = None,
        instruction: str | Sequence[str] = "",
        *,
        horizon: int | None = None,
        parameters: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> NDArray[np.float32]:
        """As `AsyncPolicyClient.act`."""
        return self._wait(
            self._client.act(
                images,
                state,
                instruction,
                horizon=horizon,
                parameters=parameters,
                timeout_s=timeout_s,
            )
        )

    def infer(self, observation: Observation, *, timeout_s: float | None = None) -> Actions:
        """As `AsyncPolicyClient.infer`."""
        return self._wait(self._client.infer(observation, timeout_s=timeout_s))

    def call(self, observation: Observation, *, timeout_s: float | None = None) -> InferenceAnswer:
        """As `AsyncPolicyClient.call`."""
        return self._wait(self._client.call(observation, timeout_s=timeout_s))

    def healthy(self, *, timeout_s: float | None = None) -> bool:
        """As `AsyncPolicyClient.healthy`."""
        return self._wait(self._client.healthy(timeout_s=timeout_s))

    def close(self) -> None:
        """Calling it again changes nothing."""
        with self._turn:
            if self._closed:
                return
            self._closed = True
            self._loop.run(self._client.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[None, None, T]) -> T:
        with closing(work), self._turn:
            refuse_inside_a_loop("PolicyClient")
            if self._closed:
                raise EngineUnavailableError("the client is closed; make a new one")
            return self._loop.run(work)


async def _made(address: str, model: str, settings: PolicySettings | None) -> AsyncPolicyClient:
    return AsyncPolicyClient(address, model=model, settings=settings)
