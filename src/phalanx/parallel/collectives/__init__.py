"""What carries data between the ranks of one group; chosen by the backend's name."""

from __future__ import annotations

from torch import distributed as dist

from phalanx.errors import ConfigurationError
from phalanx.parallel.collectives.base import GroupCollectives, ReduceOp
from phalanx.parallel.collectives.gloo import GlooCollectives
from phalanx.parallel.collectives.nccl import NcclCollectives

__all__ = ["GroupCollectives", "ReduceOp", "create_collectives"]


def create_collectives(
    backend: str, process_group: dist.ProcessGroup, members: tuple[int, ...]
) -> GroupCollectives:
    """The collectives of `backend` over a process group whose ranks are `members`."""
    match backend:
        case "gloo":
            return GlooCollectives(process_group, members)
        case "nccl":
            return NcclCollectives(process_group, members)
    raise ConfigurationError(f"no collectives are named {backend!r}; allowed: gloo, nccl")
