"""The process group over all ranks of a replica, from which a mesh takes its groups.

Whoever runs the ranks makes it once a process; a launcher's own group serves as well.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from phalanx import settings
from phalanx.errors import ConfigurationError, PhalanxDistError
from phalanx.schema.loopback import is_loopback

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What ranks communicate by, for each type of device."""


@dataclass(frozen=True)
class DefaultGroup:
    """This process's place in the group over all ranks."""

    rank: int
    size: int
    backend: str


def default_group() -> DefaultGroup | None:
    """The process group over all ranks, whoever made it; None where there is none."""
    if not dist.is_initialized():
        return None
    return DefaultGroup(dist.get_rank(), dist.get_world_size(), dist.get_backend())


def init_process_group(
    *,
    device: torch.device | str,
    rank: int,
    world_size: int,
    init_method: str = "env://",
    timeout_s: float = 1800.0,
    backend: str | None = None,
) -> None:
    """Join the process group over all `world_size` ranks; returns when all have joined.

    `init_method` is `tcp://HOST:PORT`, where rank 0 will listen on that address and no other, or
    `env://` under a launcher that sets MASTER_ADDR and MASTER_PORT. `timeout_s` bounds this call
    and every later collective. Raises `PhalanxDistError` where a group exists already, the address
    is taken, or ranks do not arrive.
    """
    existing = default_group()
    if existing is not None:
        raise PhalanxDistError(
            f"this process is already rank {existing.rank} of a process group of {existing.size}; "
            "destroy that one first, or use it"
        )
    device = torch.device(device)
    chosen = backend or backend_for(device)
    timeout = timedelta(seconds=timeout_s)
    address = None if init_method == "env://" else _address(init_method)
    try:
        if address is None:
            store = _launcher_store(rank, world_size, timeout)
        else:
            store = _store(address, rank, timeout)
        dist.init_process_group(
            chosen,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" and device.index is not None else None,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise PhalanxDistError(
            f"rank {rank} of {world_size} could not form a {chosen} process group at {init_method}: "
            f"{first_line(error)}; see that the address is free and that every rank is started"
        ) from error


def destroy_process_group() -> None:
    """Leave the process group over all ranks; does nothing where there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def backend_for(device: torch.device) -> str:
    """What ranks on such devices communicate by. Raises `ConfigurationError`."""
    name = BACKENDS.get(device.type)
    if name is None:
        raise ConfigurationError(
            f"no collectives exist for devices of type {device.type!r}; allowed: "
            f"{', '.join(BACKENDS)}"
        )
    return name


def first_line(error: Exception) -> str:
    """What torch says, without the stack of its own that follows."""
    return str(error).partition("\n")[0].strip()


def _store(address: tuple[str, int], rank: int, timeout: timedelta) -> Store:
    """Where ranks find one another; on rank 0 the server of it."""
    host, port = address
    if is_loopback(host):
        settings.keep_gloo_on_loopback()
    listening = None
    if rank == 0:
        # torch would listen on every interface of the machine.
        listening = socket.create_server((host, port), backlog=2048).detach()
    store: Store = dist.TCPStore(  # type: ignore[attr-defined] # public, but not in its __all__
        host,
        port,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    return store


def _launcher_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """A part of the launcher's store that no earlier process group of these ranks has used.

    The launcher's store outlives a group, and what one left there would lead the next one astray.
    """
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    num_joined = store.add("phalanx/joined", 1)
    return PrefixStore(f"phalanx/{(num_joined - 1) // world_size}", store)


def _address(init_method: str) -> tuple[str, int]:
    parts = urlsplit(init_method)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port:
        raise ConfigurationError(
            f"init_method {init_method!r} is not valid; allowed: env://, or tcp://HOST:PORT"
        )
    return parts.hostname, port
