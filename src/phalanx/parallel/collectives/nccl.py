"""Collectives over CUDA tensors by NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.parallel.collectives.torch_collectives import TorchCollectives


class NcclCollectives(TorchCollectives):
    """Calls are queued on the current stream of the current device; only `barrier` waits."""

    @property
    def device_type(self) -> str:
        return "cuda"

    def barrier(self) -> None:
        index = torch.accelerator.current_device_index()
        with self._failing("barrier"):
            dist.barrier(group=self._group, device_ids=[index])
