"""A trainer's end of a weight group, made as RL frameworks make it, in a process of its own.

Joins as rank 0 and says `joined`; broadcasts the tensors of a file in the order of each list of
names that it is sent, and says `sent`.
"""

from __future__ import annotations

import multiprocessing as mp
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)


def main(end: Connection, address: str, world_size: int, name: str, file: Path) -> None:
    torch.set_num_threads(1)
    tensors = safetensors.torch.load_file(file)
    timeout = timedelta(seconds=60)
    store, rank, _ = next(rendezvous(f"tcp://{address}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        "gloo",
        PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {one: one for one in range(world_size)}
    end.send("joined")
    while True:
        for one in end.recv():
            dist.broadcast(tensors[one].contiguous(), src=0, group=group)
        end.send("sent")


class Trainer:
    """The process from outside; it ends when `close` is called."""

    def __init__(self, address: str, world_size: int, name: str, file: Path) -> None:
        context = mp.get_context("forkserver")
        # It begins where torch is imported already.
        context.set_forkserver_preload(["tests.parallel.rank_pool"])
        self._end, theirs = context.Pipe()
        arguments = (theirs, address, world_size, name, file)
        self._process = context.Process(target=main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def joined(self) -> None:
        self._expect("joined")

    def send(self, names: list[str]) -> None:
        """Begin to broadcast; `sent` waits until that is done."""
        self._end.send(names)

    def sent(self) -> None:
        self._expect("sent")

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._end.close()

    def _expect(self, word: str) -> None:
        assert self._end.recv() == word
