"""A trainer's end of a weight group, made as RL frameworks make it, in a process of its own.

Joins as rank 0 and says `joined`; broadcasts the tensors of a file in the order of the names that
each line of its input has, until that ends.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
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

ROOT = Path(__file__).parents[3]


def main(address: str, world_size: int, name: str, file: str) -> None:
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
    print("joined", flush=True)
    for line in sys.stdin:
        for one in line.split():
            dist.broadcast(tensors[one].contiguous(), src=0, group=group)
        print("sent", flush=True)


class Trainer:
    """The process from outside; it ends when `close` is called."""

    def __init__(self, address: str, world_size: int, name: str, file: Path) -> None:
        command = [sys.executable, "-m", "tests.server.rl.trainer_process"]
        self._process = subprocess.Popen(
            [*command, address, str(world_size), name, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def joined(self) -> None:
        self._expect("joined")

    def send(self, names: list[str]) -> None:
        """Begin to broadcast; `sent` waits until that is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(names) + "\n")
        self._process.stdin.flush()

    def sent(self) -> None:
        self._expect("sent")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == word + "\n", line


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
