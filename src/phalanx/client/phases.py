"""The client of a job's phases for programs without an event loop: `AsyncPhaseClient`, waited for."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.client.phases_async import AsyncPhaseClient
from phalanx.client.roles.blocking_client import BlockingClient
from phalanx.client.roles.settings import RoleClientSettings
from phalanx.wire.phases import PhasesDocument


class PhaseClient(BlockingClient[AsyncPhaseClient]):
    """As `AsyncPhaseClient`; see `BlockingClient`."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        settings: RoleClientSettings | None = None,
    ) -> None:
        super().__init__(
            "PhaseClient", lambda: AsyncPhaseClient(url, api_key=api_key, settings=settings)
        )

    def phases(self, *, timeout_s: float | None = None) -> PhasesDocument:
        """As `AsyncPhaseClient.phases`."""
        return self._loop.run(self._client.phases(timeout_s=timeout_s))

    def wait(
        self, after: int, *, wait_s: float = 20.0, timeout_s: float | None = None
    ) -> PhasesDocument:
        """As `AsyncPhaseClient.wait`."""
        return self._loop.run(self._client.wait(after, wait_s=wait_s, timeout_s=timeout_s))

    def enter(
        self,
        phase: str,
        batch: str,
        *,
        operation_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PhasesDocument:
        """As `AsyncPhaseClient.enter`."""
        return self._loop.run(
            self._client.enter(phase, batch, operation_id=operation_id, timeout_s=timeout_s)
        )

    def leave(
        self,
        *,
        abandon: bool = False,
        operation_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PhasesDocument:
        """As `AsyncPhaseClient.leave`."""
        return self._loop.run(
            self._client.leave(abandon=abandon, operation_id=operation_id, timeout_s=timeout_s)
        )

    def recover(
        self,
        holds_nothing: Iterable[str] = (),
        *,
        operation_id: str | None = None,
        timeout_s: float | None = None,
    ) -> PhasesDocument:
        """As `AsyncPhaseClient.recover`."""
        return self._loop.run(
            self._client.recover(holds_nothing, operation_id=operation_id, timeout_s=timeout_s)
        )

    def attach(
        self,
        trainer_id: str,
        *,
        holds: bool = False,
        pid: int | None = None,
        elsewhere: bool = False,
        timeout_s: float | None = None,
    ) -> PhasesDocument:
        """As `AsyncPhaseClient.attach`."""
        return self._loop.run(
            self._client.attach(
                trainer_id, holds=holds, pid=pid, elsewhere=elsewhere, timeout_s=timeout_s
            )
        )

    def release(self, trainer_id: str, *, timeout_s: float | None = None) -> PhasesDocument:
        """As `AsyncPhaseClient.release`."""
        return self._loop.run(self._client.release(trainer_id, timeout_s=timeout_s))
