"""A trainer's process: makes a weight group as RL frameworks do, and broadcasts a checkpoint in it."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

TIMEOUT = timedelta(seconds=60)


def broadcast(
    port: int, size: int, group: str, weights: str, count: int | None, held: Connection
) -> None:
    """With `count` it ends after as many tensors; with 0, once the other end of `held` is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, rank, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=TIMEOUT))
    store = PrefixStore(group, store)
    made, _ = _new_process_group_helper(
        size, rank, [], "gloo", store, group_name=group, timeout=TIMEOUT
    )
    _world.pg_group_ranks[made] = {index: index for index in range(size)}
    tensors = list(load_file(weights).values())
    for tensor in tensors[:count]:
        dist.broadcast(tensor, src=0, group=made)
    if count == 0:
        with contextlib.suppress(EOFError):
            held.recv()  # until the others have joined as well
    os._exit(0)  # as one that was killed: nothing is torn down
