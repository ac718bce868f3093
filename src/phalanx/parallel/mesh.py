"""A mesh: one rank's view of the groups of its replica, by name, with what connects their ranks.

Families of groups with the same members share one process group. Collectives of one rank must
therefore be issued one after another, on one stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from phalanx.errors import PhalanxDistError
from phalanx.parallel.collectives import GroupCollectives
from phalanx.parallel.layout import Members, RankLayout, unknown_group


@dataclass(frozen=True, eq=False)
class Group:
    """This rank's group of one family; `rank` is its position among the `members`."""

    name: str
    members: Members
    rank: int
    device: torch.device
    collectives: GroupCollectives | None
    """None in a group of one."""

    @property
    def size(self) -> int:
        return len(self.members)


class Mesh:
    """The groups that one rank belongs to."""

    def __init__(
        self,
        name: str,
        layout: RankLayout,
        rank: int,
        device: torch.device,
        connections: Mapping[Members, GroupCollectives],
        owned: tuple[dist.ProcessGroup, ...] = (),
        *,
        output_rank: int = 0,
    ) -> None:
        """`connections` holds this rank's groups of several ranks; `close` destroys `owned`."""
        self.name = name
        self.layout = layout
        self.rank = rank
        self.output_rank = output_rank
        """The rank whose answers count; what only an answer needs, no other rank computes."""
        self.device = device
        groups = {}
        for family in layout.groups:
            members = layout.members_for(family, rank)
            connected = connections.get(members)
            groups[family] = Group(family, members, members.index(rank), device, connected)
        self._groups: Mapping[str, Group] = MappingProxyType(groups)
        self._owned = owned
        self._closed = False

    @property
    def world_size(self) -> int:
        """Number of ranks of the replica."""
        return self.layout.world

    @property
    def answers(self) -> bool:
        """Whether this is the output rank."""
        return self.rank == self.output_rank

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def group(self, name: str) -> Group:
        """This rank's group of a family. Raises `UnknownGroupError`."""
        if self._closed:
            raise PhalanxDistError(f"the mesh {self.name!r} is closed; its groups are gone")
        found = self._groups.get(name)
        if found is None:
            raise unknown_group(name, self.group_names)
        return found

    def group_members(self, name: str) -> Members:
        """The ranks of this rank's group, ascending."""
        return self.group(name).members

    def group_size(self, name: str) -> int:
        return self.group(name).size

    def group_rank(self, name: str) -> int:
        """This rank's position in its group."""
        return self.group(name).rank

    def distinct_groups(self) -> tuple[Group, ...]:
        """This rank's groups of several ranks, one of each membership."""
        found: dict[Members, Group] = {}
        for group in self._groups.values():
            if group.size > 1:
                found.setdefault(group.members, group)
        return tuple(found.values())

    def close(self) -> None:
        """Give the process groups back that were made for this mesh. Idempotent."""
        owned, self._owned = self._owned, ()
        self._closed = True
        if not dist.is_initialized():
            return  # they went with the process group over all ranks
        for process_group in owned:
            dist.destroy_process_group(process_group)
