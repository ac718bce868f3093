"""The asynchronous client of a job's phases, at its control process."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Self

import httpx
import msgspec

from phalanx.client.control_calls import ControlCalls
from phalanx.client.control_refusals import TryAgainError
from phalanx.client.roles.running_calls import RunningCalls
from phalanx.client.roles.settings import RoleClientSettings, check_key, check_positive
from phalanx.errors import DeadlineExceededError, EngineUnavailableError
from phalanx.wire.phases import (
    AttachTrainer,
    Enter,
    Leave,
    PhasesDocument,
    Recover,
    ReleaseTrainer,
)


class AsyncPhaseClient:
    """Asks the control process at `url` (the `control_url` of `phalanx status --json`), which knows
    callers by `api_key` where its file has `control.key`.

    Every operation may be lost and is asked for again with the same id until it is answered, also
    where the control process is started anew at the same address (give `control.port` for that).
    Made inside a running event loop, closed by `close` or at the end of `async with`.

    Each raises `ConfigurationError` for what is wrong, `RoleOperationRefusedError` where the job's
    state does not allow it, `RoleOperationFailedError` where it did not end well,
    `EngineUnavailableError` where this client is closed meanwhile, and `DeadlineExceededError` after
    `timeout_s`, also where the job has stopped and is not started anew.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        settings: RoleClientSettings | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` is what carries requests, where that is not a connection."""
        check_key("api_key", api_key)
        asyncio.get_running_loop()
        self.settings = settings or RoleClientSettings()
        self._running = RunningCalls()
        self._calls = ControlCalls(url, api_key, self.settings, transport)

    async def phases(self, *, timeout_s: float | None = None) -> PhasesDocument:
        """Where the job is, asked for now."""
        async with self._call("phases", timeout_s) as asking:
            return await asking.insist("/v1/phases", None)

    async def wait(
        self, after: int, *, wait_s: float = 20.0, timeout_s: float | None = None
    ) -> PhasesDocument:
        """As `phases`, once its number is not `after`, or `wait_s` later."""
        async with self._call("phases", timeout_s) as asking:
            return await asking.insist(f"/v1/phases?after={after}&wait_s={wait_s:g}", None)

    async def enter(
        self,
        phase: str,
        batch: str,
        *,
        operation_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PhasesDocument:
        """Go to `phase` of the step that makes `batch`: when this returns, its roles serve, or the
        trainer may have its devices.

        The phase after the one before of the same batch, an earlier one of it again, or the first of
        another batch. Where another operation is under way, it waits for its end first. With an
        `operation_id` that was done before, the answer tells where the job is now.
        """
        async with self._call(f"enter {phase}", timeout_s) as asking:
            asked = Enter(phase, batch, operation_id or _new_id())
            document = await asking.in_turn("/v1/phases/enter", asked)
            if document.phase is None and operation_id is None:
                # It was done, and the control process was started anew before that was heard.
                again = msgspec.structs.replace(asked, operation_id=_new_id())
                document = await asking.in_turn("/v1/phases/enter", again)
            return document

    async def leave(
        self,
        *,
        abandon: bool = False,
        operation_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PhasesDocument:
        """To no phase: roles that take turns give their memory back. `abandon`: the batch is given
        up, and another one may begin.
        """
        asked = Leave(operation_id or _new_id(), abandon)
        async with self._call("leave", timeout_s) as asking:
            return await asking.in_turn("/v1/phases/leave", asked)

    async def recover(
        self,
        holds_nothing: Iterable[str] = (),
        *,
        operation_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PhasesDocument:
        """Find out what everybody holds of whom nobody is certain; of those in `holds_nothing`, roles
        or `trainer`, the caller knows that it is nothing.
        """
        asked = Recover(operation_id or _new_id(), tuple(holds_nothing))
        async with self._call("recover", timeout_s) as asking:
            return await asking.of_now(
                "/v1/phases/recover", lambda seen: msgspec.structs.replace(asked, seen=seen)
            )

    async def attach(
        self,
        trainer_id: str,
        *,
        holds: bool = False,
        pid: int | None = None,
        elsewhere: bool = False,
        timeout_s: float | None = None,
    ) -> PhasesDocument:
        """Tell that this process is the trainer, and whether it `holds` memory on its devices.

        `pid` is that of another process of the same machine, `elsewhere`: it runs on another one.
        """
        number = None if elsewhere else (os.getpid() if pid is None else pid)
        async with self._call("attach", timeout_s) as asking:
            return await asking.of_now(
                "/v1/trainer/attach", lambda seen: AttachTrainer(trainer_id, holds, number, seen)
            )

    async def release(self, trainer_id: str, *, timeout_s: float | None = None) -> PhasesDocument:
        """Tell that the trainer has given the memory on its devices back."""
        async with self._call("release", timeout_s) as asking:
            return await asking.of_now(
                "/v1/trainer/release", lambda seen: ReleaseTrainer(trainer_id, seen)
            )

    async def close(self) -> None:
        """Calls that still run end with `EngineUnavailableError`. Again changes nothing."""
        await self._running.close()
        await self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @asynccontextmanager
    async def _call(self, what: str, timeout_s: float | None) -> AsyncIterator[_Asking]:
        limit_s = self.settings.timeout_s if timeout_s is None else timeout_s
        check_positive("timeout_s", limit_s)
        asking = _Asking(self._calls, self.settings.retry_s)
        try:
            async with self._running.call(asyncio.get_running_loop().time() + limit_s, what):
                yield asking
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                f"{what}: not done within {limit_s:g} s: {asking.problem}"
            ) from error


class _Asking:
    """One call, which goes on until it is answered. `problem` is what it waits for."""

    def __init__(self, calls: ControlCalls, retry_s: float) -> None:
        self._calls = calls
        self._retry_s = retry_s
        self.problem = "it has no answer yet, and goes on without this caller"

    async def in_turn(self, path: str, asked: msgspec.Struct) -> PhasesDocument:
        """Ask until it is the turn of this operation."""
        while True:
            try:
                return await self.insist(path, asked)
            except TryAgainError as error:
                self.problem = str(error)
            await self._end_of_transition()

    async def _end_of_transition(self) -> None:
        document = await self.insist("/v1/phases", None)
        while document.transition is not None:
            document = await self.insist(f"/v1/phases?after={document.number}&wait_s=20", None)

    async def of_now(self, path: str, asked: Callable[[int], msgspec.Struct]) -> PhasesDocument:
        """As `in_turn`, for what is true at the number that it is given and perhaps not later."""
        while True:
            document = await self.insist("/v1/phases", None)
            try:
                return await self.insist(path, asked(document.number))
            except TryAgainError as error:
                self.problem = str(error)
            await self._end_of_transition()

    async def insist(self, path: str, asked: msgspec.Struct | None) -> PhasesDocument:
        """Ask until somebody answers."""
        while True:
            try:
                return await self._calls.ask(path, asked, PhasesDocument)
            except EngineUnavailableError as error:
                self.problem = str(error)
            await asyncio.sleep(self._retry_s)


def _new_id() -> str:
    return secrets.token_hex(8)
