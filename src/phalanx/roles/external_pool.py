"""Replicas that somebody else runs, at addresses that the specification gives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

from phalanx.errors import ConfigurationError
from phalanx.roles.contracts import LaunchedReplica, Launcher, ReplicaLaunch
from phalanx.roles.engine_command import BOOTSTRAP_PORT
from phalanx.roles.replica_devices import slot
from phalanx.schema.roles import EngineKind, WorkerType


@dataclass(frozen=True)
class ExternalReplica:
    """A server at `url`; nothing is known of its processes."""

    url: str
    bootstrap_port: int | None = None

    async def exited(self) -> str:
        """Never returns."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def stop(self, grace_s: float) -> None:
        """Let go of it; it runs on."""


class ExternalPool:
    """Gives replica N of a group the N-th of its `urls`.

    Prefill workers tell their bootstrap ports as `engine_args.bootstrap_port`: a number, or a list
    of one for each url.
    """

    async def launch(self, launch: ReplicaLaunch) -> ExternalReplica:
        """Raises `ConfigurationError` where there is no url for it, or one that cannot be called."""
        urls, at = launch.group.urls, slot(launch)
        if not 0 <= at < len(urls):
            raise ConfigurationError(
                f"{launch.engine_id}: its external group has {len(urls)} urls; more replicas need"
                " more urls"
            )
        return ExternalReplica(base_url(urls[at]), _bootstrap_port(launch, at))

    async def close(self) -> None:
        """There is nothing to stop."""


class LauncherByKind:
    """External groups go to one launcher, and those whose processes are started to another."""

    def __init__(self, started: Launcher, external: Launcher) -> None:
        self._started = started
        self._external = external

    async def launch(self, launch: ReplicaLaunch) -> LaunchedReplica:
        is_external = launch.group.engine is EngineKind.EXTERNAL
        return await (self._external if is_external else self._started).launch(launch)

    async def close(self) -> None:
        try:
            await self._started.close()
        finally:
            await self._external.close()


def base_url(text: str) -> str:
    """`http://HOST:PORT`, with a path perhaps, as it is called; raises `ConfigurationError`."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"{text!r} is no url: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"{text!r} must be a url as http://HOST:PORT")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigurationError(
            f"{parts.scheme}://{parts.hostname}:{port} is given with a user, a query or a fragment;"
            " give http://HOST:PORT"
        )
    return text.rstrip("/")


def _bootstrap_port(launch: ReplicaLaunch, at: int) -> int | None:
    if launch.group.worker_type is not WorkerType.PREFILL:
        return None
    given = launch.group.engine_args.get(BOOTSTRAP_PORT)
    port = given[at] if isinstance(given, (list, tuple)) and at < len(given) else given
    if port is not None and (isinstance(port, bool) or not isinstance(port, int)):
        raise ConfigurationError(
            f"{launch.engine_id}: engine_args.bootstrap_port={given!r} must be a port, or a list of"
            " one for each url"
        )
    return port
