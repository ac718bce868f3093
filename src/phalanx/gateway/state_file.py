"""The registered servers in a file, so that they are there after a restart of the gateway.

The file is replaced whole and belongs to one running gateway. What cannot be read is refused, never
overwritten.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from pathlib import Path
from typing import IO

import msgspec

from phalanx.errors import ConfigurationError
from phalanx.routing.endpoint import Endpoint
from phalanx.routing.pool_registry import PoolRegistry, check_model_name
from phalanx.routing.snapshot import ServerState, Snapshot

logger = logging.getLogger(__name__)
FORMAT = 1


class SavedServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_name: str
    endpoint: str
    managed: bool


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    servers: tuple[SavedServer, ...]


class StateFile:
    """Reads and writes `path`. Holds a lock on `path` + `.lock` until it is closed.

    `servers` are those that it held at first, none where there was no file. Raises
    `ConfigurationError` where it cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: IO[str] = _locked(path)
        try:
            self.servers = self._load()
        except ConfigurationError:
            self.close()
            raise

    def save(self, servers: tuple[SavedServer, ...]) -> None:
        """Replace the file; it holds the old servers or the new ones, also after a crash."""
        text = msgspec.json.format(msgspec.json.encode(_Document(FORMAT, servers)), indent=1)
        beside = self._path.with_name(self._path.name + ".new")
        with beside.open("wb") as file:
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        self._lock.close()

    def _load(self) -> tuple[SavedServer, ...]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ConfigurationError(
                f"--state-file {self._path} cannot be read: {error.strerror}"
            ) from None
        try:
            document = msgspec.json.decode(data, type=_Document)
            if document.format != FORMAT:
                raise ConfigurationError(f"format is {document.format}, not {FORMAT}")
            for server in document.servers:
                check_model_name(server.model_name)
                Endpoint.parse(server.endpoint)
        except (msgspec.DecodeError, UnicodeDecodeError, ConfigurationError) as error:
            raise ConfigurationError(
                f"--state-file {self._path} is not a gateway's state: {error}; correct it, or move"
                " it away to start with no servers"
            ) from None
        return document.servers


class StateKeeper:
    """Restores the servers of the state file, and writes it after each change of who is registered.

    `run` goes on until it is cancelled.
    """

    def __init__(self, registry: PoolRegistry, file: StateFile) -> None:
        self._registry = registry
        self._file = file
        for saved in file.servers:
            endpoint = Endpoint.parse(saved.endpoint)
            registry.restore(saved.model_name, endpoint, managed=saved.managed)
        self._written = file.servers
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._fault = ""
        registry.publisher.listen(self._published)

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = saved_servers(self._registry.publisher.snapshot)
            try:
                await asyncio.to_thread(self._file.save, wanted)
            except OSError as error:
                self._fault = f"the state file cannot be written: {error.strerror or error}"
                logger.error("%s", self._fault)
            else:
                self._fault = ""
                self._written = wanted
            if not self._changed.is_set():
                self._settled.set()

    async def saved(self) -> str:
        """Wait until the file holds who is registered now; else say in words why it does not."""
        await self._settled.wait()
        return self._fault

    def _published(self, snapshot: Snapshot) -> None:
        if self._fault or saved_servers(snapshot) != self._written or not self._settled.is_set():
            self._settled.clear()
            self._changed.set()


def saved_servers(snapshot: Snapshot) -> tuple[SavedServer, ...]:
    return tuple(
        SavedServer(server.model_name, str(server.endpoint), server.managed)
        for server in snapshot.servers
        if server.state is not ServerState.DRAINING
    )


def _locked(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise ConfigurationError(
            f"--state-file {path} cannot be used: {error.strerror}; give a path in a folder that can"
            " be written"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigurationError(
            f"--state-file {path} is in use by another gateway; give each its own, or let this one"
            " --follow that one"
        ) from None
    return lock
