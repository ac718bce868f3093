"""Communication between the ranks of one replica: `from phalanx import parallel as P`.

The only place that names `torch.distributed`. Names are resolved on first use, so that the layout
and the rules of sharding can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.parallel.collectives.base import ReduceOp
    from phalanx.parallel.current import default_mesh, use_mesh
    from phalanx.parallel.layout import GROUP_NAMES, RankLayout, build_layout, memberships
    from phalanx.parallel.mesh import Group, Mesh
    from phalanx.parallel.ops import (
        all_gather,
        all_reduce,
        all_reduce_,
        all_to_all,
        barrier,
        broadcast,
        recv,
        reduce_scatter,
        send,
    )
    from phalanx.parallel.process_group import (
        DefaultGroup,
        default_group,
        destroy_process_group,
        init_process_group,
    )
    from phalanx.parallel.start import create_mesh, init, shutdown, warmup_collectives

__all__ = [
    "GROUP_NAMES",
    "DefaultGroup",
    "Group",
    "Mesh",
    "RankLayout",
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast",
    "build_layout",
    "create_mesh",
    "default_group",
    "default_mesh",
    "destroy_process_group",
    "init",
    "init_process_group",
    "memberships",
    "recv",
    "reduce_scatter",
    "send",
    "shutdown",
    "use_mesh",
    "warmup_collectives",
]

_HOME = {
    "GROUP_NAMES": "layout",
    "DefaultGroup": "process_group",
    "Group": "mesh",
    "Mesh": "mesh",
    "RankLayout": "layout",
    "ReduceOp": "collectives.base",
    "all_gather": "ops",
    "all_reduce": "ops",
    "all_reduce_": "ops",
    "all_to_all": "ops",
    "barrier": "ops",
    "broadcast": "ops",
    "build_layout": "layout",
    "create_mesh": "start",
    "default_group": "process_group",
    "default_mesh": "current",
    "destroy_process_group": "process_group",
    "init": "start",
    "init_process_group": "process_group",
    "memberships": "layout",
    "recv": "ops",
    "reduce_scatter": "ops",
    "send": "ops",
    "shutdown": "start",
    "use_mesh": "current",
    "warmup_collectives": "start",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'phalanx.parallel' has no attribute {name!r}")
    value: object = getattr(import_module(f"phalanx.parallel.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
