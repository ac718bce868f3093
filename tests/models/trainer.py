"""A trainer's process: makes a weight group as RL frameworks do, and broadcasts a checkpoint in it.

`python -m tests.models.trainer PORT WORLD GROUP WEIGHTS [COUNT]`: with COUNT it ends after as many
tensors; with 0, once its input ends.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

TIMEOUT = timedelta(seconds=60)


def main(port: str, world: str, group: str, weights: str, count: str | None = None) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    size = int(world)
    store, rank, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=TIMEOUT))
    store = PrefixStore(group, store)
    made, _ = _new_process_group_helper(
        size, rank, [], "gloo", store, group_name=group, timeout=TIMEOUT
    )
    _world.pg_group_ranks[made] = {index: index for index in range(size)}
    tensors = list(load_file(weights).values())
    for tensor in tensors if count is None else tensors[: int(count)]:
        dist.broadcast(tensor, src=0, group=made)
    if count == "0":
        sys.stdin.read()  # until the others have joined as well
    os._exit(0)  # as one that was killed: nothing is torn down


if __name__ == "__main__":
    main(*sys.argv[1:])
