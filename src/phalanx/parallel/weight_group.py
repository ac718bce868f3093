"""A process group in which a trainer, rank 0, broadcasts weights to the ranks of its engines.

It stands beside the groups of a replica, and is found in the trainer's store by the keys that
`torch.distributed` gives a group of this name; so the trainer may make its end by torch's own means.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from phalanx import settings
from phalanx.errors import PhalanxDistError
from phalanx.parallel.process_group import BACKENDS, first_line
from phalanx.schema.loopback import is_loopback

TRAINER = 0
"""The rank that sends."""


class WeightGroup:
    """This process's end; every member makes the same calls in the same order."""

    def __init__(
        self,
        address: tuple[str, int],
        rank: int,
        world_size: int,
        name: str,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Returns when all members have joined. Raises `PhalanxDistError` where they do not."""
        self._name = name
        self._world_size = world_size
        timeout = timedelta(seconds=timeout_s)
        host, port = address
        if is_loopback(host):
            settings.keep_gloo_on_loopback()
        try:
            store: Store = dist.TCPStore(  # type: ignore[attr-defined] # public, not in __all__
                host, port, world_size, False, timeout
            )
            self._store = store
            for prefix in (name, f"{name}/", f"{device.type}/"):
                store = PrefixStore(prefix, store)
            self._group = _backend(device, store, rank, world_size, timeout)
        except (RuntimeError, OSError, ValueError) as error:
            raise PhalanxDistError(
                f"rank {rank} of {world_size} could not join the weight group {name!r} at "
                f"{host}:{port} within {timeout_s:g} s: {first_line(error)}; see that the trainer "
                "listens there and that every member joins"
            ) from error

    @property
    def stands(self) -> bool:
        """Whether the trainer that made the group still has its store."""
        try:
            self._store.num_keys()
        except RuntimeError:
            return False
        return True

    def receive(self, x: Tensor) -> None:
        """Fill the contiguous `x` with the trainer's next tensor, of the same shape and dtype.

        Raises `PhalanxDistError` where it does not come; the group is of no use then.
        """
        options = dist.BroadcastOptions()
        options.rootRank = TRAINER
        try:
            self._group.broadcast([x], options).wait()  # type: ignore[union-attr] # not in the stubs
        except (RuntimeError, ValueError) as error:
            raise PhalanxDistError(
                f"no tensor came from the trainer in weight group {self._name!r} of "
                f"{self._world_size}: {first_line(error)}"
            ) from error


def _backend(
    device: torch.device, store: Store, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    """What broadcasts tensors of such a device."""
    if BACKENDS.get(device.type) == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, world_size, options)
