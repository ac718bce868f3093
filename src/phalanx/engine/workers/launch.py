"""Starts a worker's process as Python's spawn does: a fresh interpreter, which inherits nothing but
what it is given. The kernel ends it with the thread that starts it here.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any

from phalanx import settings
from phalanx.engine.deployment_plan import DeploymentPlan
from phalanx.engine.workers.pickled import Pickled
from phalanx.engine.workers.process import Boot
from phalanx.engine.workers.runtime import WorkerFactorySpec
from phalanx.errors import ConfigurationError
from phalanx.schema.deployment import WorkerSupervisorConfig
from phalanx.schema.placement import WorkerPlacement

_PROGRAM = (
    "import marshal, sys; boot = open(int(sys.argv[1]), 'rb'); sys.path = marshal.load(boot); "
    "from phalanx.engine.workers.process import main; main(boot, *map(int, sys.argv[2:]))"
)
"""The import path comes first, so that nothing in the working directory is taken for a module."""


def preparation() -> dict[str, Any]:
    """What Python's spawn tells a new process of this one: import path, arguments, main module.

    Raises `ConfigurationError` in a worker that is importing its main module.
    """
    try:
        facts: dict[str, Any] = spawn.get_preparation_data("")
    except RuntimeError as error:
        raise ConfigurationError(
            "workers cannot be started here: this process is a worker itself, still importing the "
            'main module; construct the engine under if __name__ == "__main__":, so that importing '
            "the module does not start another"
        ) from error
    # Pickled plainly: what holds it stays between the two processes.
    facts["authkey"] = bytes(facts["authkey"])
    return facts


@dataclass(frozen=True)
class Launch:
    """A worker that is to be started, in this environment."""

    placement: WorkerPlacement
    boot: Boot
    environment: Mapping[str, str]


def plan_launches(
    plan: DeploymentPlan,
    factory: Callable[[WorkerPlacement], WorkerFactorySpec],
    config: WorkerSupervisorConfig,
    target: str,
) -> tuple[Launch, ...]:
    """Everything that the workers of this node need, by `worker_id`; nothing is started.

    `target` is the engine's device target, which each worker gets with its own index.
    """
    facts = preparation()
    launches = []
    for placement in plan.workers:
        if placement.node_rank != config.node_rank:
            continue
        spec = factory(placement)
        boot = Boot(
            worker_id=placement.worker_id,
            replica_id=placement.replica_id,
            replica_rank=placement.replica_rank,
            title=_title(placement),
            preparation={**facts, "name": f"phalanx-worker-{placement.worker_id}"},
            factory=Pickled.of(spec, f"the configuration of worker factory {spec.target}"),
        )
        variables = {**_variables(placement, plan, config, target), **dict(config.extra_env)}
        launches.append(Launch(placement, boot, settings.child_environment(variables)))
    if not launches:
        raise ConfigurationError(
            f"no worker of the deployment belongs to node_rank={config.node_rank}; its workers are "
            f"on {sorted({placement.node_rank for placement in plan.workers})}"
        )
    return tuple(launches)


def _variables(
    placement: WorkerPlacement, plan: DeploymentPlan, config: WorkerSupervisorConfig, target: str
) -> dict[str, str]:
    """Which rank the worker is and where its replica meets.

    The device is pinned, so that an inherited PHALANX_DEVICE cannot undo the placement.
    """
    index = placement.device_index
    device = f"cuda:{index}" if target.partition(":")[0] == "cuda" else target
    return {
        "MASTER_ADDR": plan.master_addrs[placement.replica_id] or config.master_addr,
        "MASTER_PORT": str(config.base_port + placement.replica_id),
        "RANK": str(placement.replica_rank),
        "WORLD_SIZE": str(plan.replica_world_size),
        "LOCAL_RANK": str(index),
        "PHALANX_DEVICE": device,
    }


def _title(placement: WorkerPlacement) -> str:
    """A worker's name in the list of processes."""
    ranks = "".join(
        f"_{group.upper()}{rank}"
        for group, rank in placement.group_ranks.items()
        if rank > 0 and group != "world"
    )
    return f"phalanx::worker_R{placement.replica_id}{ranks}"


class WorkerProcess:
    """One worker's process, with a descriptor that becomes readable when it has ended.

    For the thread that started it, but for `pid`.
    """

    def __init__(self, launch: Launch, connection: socket.socket) -> None:
        """Start it; `connection` is its end of the pair of sockets, which the caller closes.

        It has its environment from its first instruction, as the dynamic loader, the interpreter
        and libraries of threads read theirs when they are loaded.
        """
        boot_file = _boot_file(launch.boot)
        command = [
            *spawn.get_command_line()[:-2],  # interpreter and flags, without Python's own program
            _PROGRAM,
            *(str(number) for number in (boot_file, connection.fileno(), os.getpid())),
        ]
        # Blocked until the worker ignores it, so that no Ctrl-C ends it before.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(boot_file, connection.fileno()),
                env=launch.environment,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(boot_file)
        self.pid = self._process.pid
        try:
            self.sentinel = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise

    def wait(self) -> int:
        """Wait for its end; returns the exit status, negative for a signal."""
        return self._process.wait()

    def ends_within(self, timeout_s: float) -> bool:
        """Whether it has ended, or does within this time."""
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Forget a process that has ended; waits where it has not."""
        self._process.wait()
        os.close(self.sentinel)


def _boot_file(boot: Boot) -> int:
    """A file in memory; a pipe would make the parent wait for a worker that is slow to read."""
    path = [entry for entry in boot.preparation["sys_path"] if isinstance(entry, str)]
    descriptor = os.memfd_create("phalanx-boot")
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            marshal.dump(path, file)
            pickle.dump(boot, file, pickle.HIGHEST_PROTOCOL)
        os.lseek(descriptor, 0, os.SEEK_SET)
        undo.pop_all()
    return descriptor
