"""Real ranks in processes of their own, which run what a test gives them."""

from __future__ import annotations

import contextvars
import multiprocessing as mp
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from phalanx import parallel as P
from phalanx.schema.parallel import ParallelConfig

TIMEOUT_S = 60.0
"""How long a rank whose peers failed waits for them; no test that passes does."""


class RankPool:
    """`size` ranks of one process group."""

    def __init__(self, size: int, device_type: str = "cpu") -> None:
        self.size = size
        context = mp.get_context("forkserver")
        # Ranks begin where torch is imported already, which takes longer than most of the tests.
        context.set_forkserver_preload([__name__])
        port = free_port()
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            device = f"cuda:{rank}" if device_type == "cuda" else device_type
            arguments = (theirs, rank, size, port, device)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, check: Callable[..., Any], *args: object) -> list[Any]:
        """`check(*args)` in every rank at once; each rank's result, or the first one's failure.

        Each run is in a context of its own, and its mesh is shut down after it.
        """
        for end in self._ends:
            end.send_bytes(pickle.dumps((check, args)))
        answers = [pickle.loads(end.recv_bytes()) for end in self._ends]
        for rank, (failure, _) in enumerate(answers):
            assert failure is None, f"rank {rank} of {self.size}:\n{failure}"
        return [result for _, result in answers]

    def run_without(self, lost: int, check: Callable[..., Any], *args: object) -> Any:
        """As `run`, where rank `lost` ends its process and the one other rank answers."""
        for end in self._ends:
            end.send_bytes(pickle.dumps((check, args)))
        failure, result = pickle.loads(self._ends[1 - lost].recv_bytes())
        assert failure is None, failure
        return result

    def kill(self) -> None:
        for process, end in zip(self._processes, self._ends, strict=True):
            process.kill()
            process.join()
            end.close()

    def close(self) -> None:
        for end in self._ends:
            end.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join()
            assert process.exitcode == 0
        for end in self._ends:
            end.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def mesh_of(parallel: ParallelConfig) -> P.Mesh:
    """A mesh of all ranks of the pool, or of the one rank where none runs, current from here on."""
    return P.init(parallel, timeout_s=TIMEOUT_S)


def _serve(end: Connection, rank: int, size: int, port: int, device: str) -> None:
    torch.set_num_threads(1)
    P.init_process_group(
        device=device,
        rank=rank,
        world_size=size,
        init_method=f"tcp://127.0.0.1:{port}",
        timeout_s=TIMEOUT_S,
    )
    while (work := pickle.loads(end.recv_bytes())) is not None:
        end.send_bytes(pickle.dumps(contextvars.copy_context().run(_run, *work)))
    P.destroy_process_group()
    # A thread of gloo's may still be ending; the interpreter's own end would abort under it.
    os._exit(0)


def _run(check: Callable[..., Any], args: tuple[object, ...]) -> tuple[str | None, Any]:
    try:
        return None, check(*args)
    except BaseException:
        return traceback.format_exc(), None
    finally:
        P.shutdown()
