"""A launcher whose replicas are reached through a proxy in which faults can be set."""

from __future__ import annotations

import os
import signal
from functools import partial

from phalanx.roles.contracts import ReplicaLaunch
from phalanx.roles.local_launcher import LocalLauncher, LocalReplica
from phalanx.testing.fault_proxy import FaultServer


class FaultyReplica:
    """A replica of a `LocalLauncher`, at the address of `server`, which stands in front of it."""

    def __init__(self, replica: LocalReplica, server: FaultServer) -> None:
        self.replica = replica
        self.server = server

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def bootstrap_port(self) -> int | None:
        return self.replica.bootstrap_port

    async def exited(self) -> str:
        return await self.replica.exited()

    async def stop(self, grace_s: float) -> None:
        await self.replica.stop(grace_s)
        await self.server.close()


class FaultyLauncher:
    """Puts a `FaultServer` in front of each replica that `launcher` starts. When the proxy lets its
    engine die, its process is killed for real.
    """

    def __init__(self, launcher: LocalLauncher) -> None:
        self.replicas: dict[str, FaultyReplica] = {}
        """The last one started of each engine id."""
        self._launcher = launcher

    def server(self, engine_id: str) -> FaultServer:
        """Where faults of this replica are set."""
        return self.replicas[engine_id].server

    async def launch(self, launch: ReplicaLaunch) -> FaultyReplica:
        replica = await self._launcher.launch(launch)
        server = FaultServer(replica.url, on_crash=partial(_kill, replica.pid))
        try:
            await server.revive()
        except BaseException:
            await replica.stop(0.0)
            raise
        faulty = self.replicas[launch.engine_id] = FaultyReplica(replica, server)
        return faulty

    async def close(self) -> None:
        await self._launcher.close()
        for faulty in self.replicas.values():
            await faulty.server.close()


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
