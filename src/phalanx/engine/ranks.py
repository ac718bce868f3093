"""This process's place in a replica: its device, its configuration and its groups of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from phalanx import parallel as P
from phalanx.clock import SystemClock
from phalanx.engine.boundary import Raised, attempt, run_every
from phalanx.engine.lockstep.rank_links import (
    Address,
    FollowerLink,
    LeaderLinks,
    LeaderListener,
    address_towards,
)
from phalanx.engine_config import EngineConfig, use_engine_config
from phalanx.errors import PhalanxDistError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_ADDRESS_BYTES = 512


@dataclass(frozen=True)
class RankPlace:
    """Rank `rank` of a replica of `world`; the output rank answers requests and leads the others.

    The ranks find one another at `master`: rank 0 listens there, or a launcher does already.
    """

    rank: int = 0
    world: int = 1
    output_rank: int = 0
    master: tuple[str, int] = ("127.0.0.1", 29500)
    launched: bool = False

    @property
    def is_leader(self) -> bool:
        return self.rank == self.output_rank


class Rank:
    """One rank, joined to the others of its replica when it is built."""

    def __init__(self, config: EngineConfig, place: RankPlace) -> None:
        """Every rank of the replica does this at the same time. Raises `PhalanxDistError`."""
        from phalanx.device import create_backend

        self.config = config
        self.place = place
        self._owns_group = False
        self._backend = create_backend(config.device.target)
        device = self._backend.device
        if place.world > 1:
            self._join(str(device))
        connected = attempt(partial(self._connect, device))
        if isinstance(connected, Raised):
            self._leave_group()
            raise connected.error
        self.mesh = connected

    @contextmanager
    def activated(self) -> Iterator[None]:
        """What holds around a plugin's calls in the calling thread.

        Configuration and groups of ranks are current, the device is this thread's, gradients are
        off, and torch computes with `num_threads` threads (torch keeps that number for each
        calling thread).
        """
        import torch

        from phalanx.device import create_backend

        wanted = self.config.runtime.num_threads
        before = torch.get_num_threads()
        create_backend(self.config.device.target)
        if wanted is not None and wanted != before:
            torch.set_num_threads(wanted)
        try:
            with use_engine_config(self.config), P.use_mesh(self.mesh), torch.no_grad():
                yield
        finally:
            if wanted is not None and wanted != before:
                torch.set_num_threads(before)

    def listen_or_connect(self) -> LeaderLinks | FollowerLink:
        """Connect the leader with the other ranks, by an address that it tells them all."""
        place, timeout_s = self.place, self.config.runtime.dist_timeout_s
        if place.is_leader:
            listener = LeaderListener(address_towards(*place.master))
            self._broadcast_address(listener.address)
            others = [rank for rank in range(place.world) if rank != place.rank]
            return listener.accept(others, timeout_s, SystemClock())
        address = self._broadcast_address(None)
        return FollowerLink(address, place.rank, timeout_s)

    def synchronize(self) -> None:
        """Return when everything submitted to the device has finished."""
        self._backend.record_event().synchronize()

    def close(self) -> None:
        """Leave the groups of ranks."""
        run_every([self.mesh.close, self._leave_group])

    def _connect(self, device: torch.device) -> P.Mesh:
        mesh = P.create_mesh(
            self.config.parallel,
            replica_world_size=self.place.world,
            device=device,
            timeout_s=self.config.runtime.dist_timeout_s,
            output_rank=self.place.output_rank,
        )
        if self.place.world > 1:
            with P.use_mesh(mesh):
                P.warmup_collectives()
        return mesh

    def _leave_group(self) -> None:
        if self._owns_group:
            self._owns_group = False
            P.destroy_process_group()

    def _join(self, device: str) -> None:
        place = self.place
        existing = P.default_group()
        if existing is not None:
            if (existing.rank, existing.size) != (place.rank, place.world):
                raise PhalanxDistError(
                    f"this process is rank {existing.rank} of a process group of {existing.size}, "
                    f"and the engine needs rank {place.rank} of {place.world}"
                )
            return
        host, port = place.master
        if ":" in host:
            host = f"[{host}]"
        try:
            P.init_process_group(
                device=device,
                rank=place.rank,
                world_size=place.world,
                init_method="env://" if place.launched else f"tcp://{host}:{port}",
                timeout_s=self.config.runtime.dist_timeout_s,
            )
        except PhalanxDistError as error:
            if place.launched:
                raise
            raise PhalanxDistError(
                f"{error}. Replica r meets at port base_port + r; choose another one with "
                "WorkerSupervisorConfig(base_port=...)"
            ) from error
        self._owns_group = True

    def _broadcast_address(self, address: Address | None) -> Address:
        import torch

        packet = bytearray(_ADDRESS_BYTES)
        if address is not None:
            encoded = msgspec.msgpack.encode(address)
            packet[:2] = len(encoded).to_bytes(2, "big")
            packet[2 : 2 + len(encoded)] = encoded
        tensor = torch.frombuffer(packet, dtype=torch.uint8).to(self.mesh.device)
        with P.use_mesh(self.mesh):
            told = P.broadcast(tensor, "world", self.place.output_rank)
        told_bytes = bytes(told.cpu().numpy())
        length = int.from_bytes(told_bytes[:2], "big")
        return msgspec.msgpack.decode(told_bytes[2 : 2 + length], type=Address)
