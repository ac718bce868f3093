"""Collectives over CPU tensors by gloo."""

from __future__ import annotations

import torch.distributed as dist

from phalanx.parallel.collectives.torch_collectives import TorchCollectives


class GlooCollectives(TorchCollectives):
    """A call returns when its result is there."""

    @property
    def device_type(self) -> str:
        return "cpu"

    def barrier(self) -> None:
        with self._failing("barrier"):
            dist.barrier(group=self._group)
