"""Makes meshes: decides the groups of a replica and connects the ranks of each."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.errors import ConfigurationError, PhalanxDistError
from phalanx.parallel.collectives import GroupCollectives, create_collectives
from phalanx.parallel.collectives.base import ReduceOp
from phalanx.parallel.current import current_mesh, default_mesh, forget_mesh, set_mesh
from phalanx.parallel.layout import Members, RankLayout, build_layout
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.process_group import BACKENDS, DefaultGroup, backend_for, default_group
from phalanx.schema.parallel import ParallelConfig


def create_mesh(
    parallel: ParallelConfig,
    *,
    replica_world_size: int | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    timeout_s: float = 1800.0,
    name: str = "model",
    output_rank: int = 0,
) -> Mesh:
    """This rank's mesh of a replica of `replica_world_size` ranks.

    Without that number it is the size of the process group over all ranks, or where there is none
    what `parallel` implies. A mesh of several ranks needs that process group, of just this size,
    and every rank must call this at the same point. `device` is where the rank's tensors live;
    `backend`, gloo or nccl, follows from the process group or the device. `output_rank` is the one
    whose answers count.
    """
    whole = default_group()
    if replica_world_size is None:
        replica_world_size = whole.size if whole else parallel.infer_replica_world_size()
    layout = build_layout(parallel.resolve(replica_world_size))
    whole = _fitting(whole, layout.world)
    chosen, device = _backend(backend, device, whole)
    if whole is None:
        return Mesh(name, layout, 0, device, {})
    connections, owned = _connect(layout, whole.rank, chosen, timedelta(seconds=timeout_s))
    return Mesh(name, layout, whole.rank, device, connections, owned, output_rank=output_rank)


def init(
    parallel: ParallelConfig,
    *,
    replica_world_size: int | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    timeout_s: float = 1800.0,
) -> Mesh:
    """Make a mesh, as `create_mesh` does, and make it the current one of this thread."""
    current = current_mesh()
    if current is not None and current.world_size > 1:
        raise PhalanxDistError(
            f"a mesh of {current.world_size} ranks is current here already; call shutdown() first"
        )
    mesh = create_mesh(
        parallel,
        replica_world_size=replica_world_size,
        device=device,
        backend=backend,
        timeout_s=timeout_s,
    )
    set_mesh(mesh)
    return mesh


def shutdown() -> None:
    """Close the current mesh, if there is one. The process group over all ranks stays."""
    mesh = current_mesh()
    if mesh is not None:
        forget_mesh(mesh)
        mesh.close()


def warmup_collectives(groups: Iterable[str] | None = None) -> None:
    """Connect the ranks of the current mesh's groups, which happens at a first collective.

    All its groups, or the named ones; every rank must call this.
    """
    mesh = default_mesh()
    chosen = mesh.distinct_groups() if groups is None else map(mesh.group, groups)
    for group in chosen:
        if group.collectives is not None:
            group.collectives.all_reduce_(torch.zeros(1, device=mesh.device), ReduceOp.SUM)


def _fitting(whole: DefaultGroup | None, world: int) -> DefaultGroup | None:
    """The process group of a mesh of `world` ranks; one rank alone needs none."""
    if world == 1:
        return None
    if whole is None:
        raise PhalanxDistError(
            f"a mesh of {world} ranks needs a process group; call init_process_group first, in "
            "each rank"
        )
    if whole.size != world:
        raise PhalanxDistError(
            f"a mesh of {world} ranks cannot be made in a process group of {whole.size}; a replica "
            "has a process group of its own"
        )
    return whole


def _backend(
    backend: str | None, device: torch.device | str | None, whole: DefaultGroup | None
) -> tuple[str, torch.device]:
    if backend is None and whole is not None and whole.backend in BACKENDS.values():
        backend = whole.backend
    if device is None:
        device = next((kind for kind, name in BACKENDS.items() if name == backend), "cpu")
    found = torch.device(device)
    fitting = backend_for(found)
    if backend is not None and backend != fitting:
        raise ConfigurationError(
            f"backend {backend!r} does not fit a device of type {found.type!r}; use {fitting!r}"
        )
    return fitting, found


def _connect(
    layout: RankLayout, rank: int, backend: str, timeout: timedelta
) -> tuple[dict[Members, GroupCollectives], tuple[dist.ProcessGroup, ...]]:
    """Process groups of all memberships: each rank makes all of them, in the same order."""
    everyone = tuple(range(layout.world))
    memberships = dict.fromkeys(
        members for family in layout.groups.values() for members in family if len(members) > 1
    )
    connections: dict[Members, GroupCollectives] = {}
    owned = []
    for members in memberships:
        if members == everyone:
            process_group = dist.group.WORLD
        else:
            process_group = dist.new_group(list(members), timeout=timeout, backend=backend)
        if rank in members:
            assert process_group is not None
            connections[members] = create_collectives(backend, process_group, members)
            if members != everyone:
                owned.append(process_group)
    return connections, tuple(owned)
