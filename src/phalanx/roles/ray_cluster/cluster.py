"""The calls of Ray that a job needs, each a coroutine that may be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from phalanx import __version__
from phalanx.errors import ConfigurationError, RoleOperationFailedError
from phalanx.roles.ray_cluster import missing
from phalanx.roles.ray_cluster.address import (
    ANY,
    check_address,
    first_line,
    refusal,
    silence,
    stale,
)
from phalanx.roles.ray_cluster.machines import Machine, NoRoomError, free_devices
from phalanx.roles.ray_cluster.observed import Place
from phalanx.roles.together import all_or_first_error

try:
    import ray
    from ray._private.services import canonicalize_bootstrap_address
    from ray._private.state import available_resources_per_node
    from ray.exceptions import RayError
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    raise missing(str(error)) from error

A = TypeVar("A")
T = TypeVar("T")
NAMESPACE = "phalanx"
LOOPBACK = "127.0.0.2"
"""Of this machine alone too; Ray takes 127.0.0.1 for the address that others reach it at."""
ACTORS_ALONE = {"prestart_worker_first_driver": False}
"""Of a cluster: it starts no worker for each processor that nobody would ask anything."""
ACTOR_CPUS = 0.1
GPU = "GPU"
_PROBE_GPUS = 0.0001
_SLICE_S = 0.5
_PAUSE_S = 0.05
_REMOVAL_S = 30.0
_PINNED = 0.001

Bundles = Sequence[Mapping[str, float]]


@dataclass(frozen=True, eq=False)
class RawGroup:
    """A placement group as Ray knows it."""

    handle: Any
    name: str
    bundles: tuple[Mapping[str, float], ...]


class RayCluster:
    """A connection of this process, which is one of a machine of the cluster."""

    def __init__(self, address: str | None, namespace: str, num_devices: int | None) -> None:
        """Connect to the cluster at `address`; None: to the one that this machine belongs to, else
        one is started here, with `num_devices` devices (None: those that the machine has).

        Blocks for seconds. Raises `ConfigurationError` where there is no cluster.
        """
        gone = None
        if address is None or address == ANY:
            gone = _cluster_that_has_ended()
            if gone is not None and address == ANY:
                raise gone
        else:
            check_address(address)
        self.namespace = namespace
        with _own_signals():
            self._is_ours = gone is not None or not self._has_joined(address)
            if self._is_ours:
                self._connect(None, num_devices)

    def _has_joined(self, address: str | None) -> bool:
        """False where this machine belongs to no cluster, and none was asked for."""
        try:
            self._connect(address or ANY)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            if address is not None:
                raise refusal(address, error) from None
            return False
        return True

    def _connect(self, address: str | None, num_devices: int | None = None) -> None:
        ray.init(
            address=address or "local",
            namespace=self.namespace,
            num_gpus=num_devices,
            include_dashboard=None if address else False,
            _node_ip_address=None if address else LOOPBACK,
            _system_config=None if address else ACTORS_ALONE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    @property
    def is_ours(self) -> bool:
        """Whether it was started here, and ends with `close`."""
        return self._is_ours

    def close(self) -> None:
        """Let go of it. What this process made there and has not deleted is deleted by Ray."""
        ray.shutdown()

    def machines(self) -> tuple[Machine, ...]:
        """Those that are alive."""
        free = available_resources_per_node()
        return tuple(
            Machine(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["NodeManagerHostname"],
                int(node["Resources"].get(GPU, 0)),
                int(free.get(node["NodeID"], {}).get(GPU, 0)),
            )
            for node in ray.nodes()
            if node["Alive"]
        )

    def is_alive(self, node_id: str) -> bool:
        return any(machine.node_id == node_id for machine in self.machines())

    async def create_group(
        self, name: str, bundles: Bundles, strategy: str, timeout_s: float
    ) -> RawGroup:
        """A placement group whose devices are all reserved. Raises `NoRoomError` where they are not
        within `timeout_s`; then, and where this is cancelled, it is gone.
        """
        handle = placement_group([dict(bundle) for bundle in bundles], strategy=strategy, name=name)
        group = RawGroup(handle, name, tuple(bundles))
        due_s = asyncio.get_running_loop().time() + timeout_s
        try:
            while not await asyncio.to_thread(handle.wait, _SLICE_S):
                if asyncio.get_running_loop().time() >= due_s:
                    raise NoRoomError(self._no_room(name, bundles, timeout_s))
        except BaseException:
            await asyncio.shield(self.remove_group(group))
            raise
        return group

    def find_group(self, name: str) -> RawGroup:
        """One that somebody else has made. Raises `ConfigurationError` where there is none."""
        try:
            handle = ray.util.get_placement_group(name)
        except ValueError:
            raise ConfigurationError(
                f"there is no placement group {name!r} in namespace {self.namespace!r}, which"
                " placement.external_groups says that somebody else has made; make it (and give it"
                " that name), or leave it out of external_groups"
            ) from None
        return RawGroup(handle, name, tuple(handle.bundle_specs))

    async def remove_group(self, group: RawGroup) -> None:
        """Returns when Ray has done it. Any number of times."""
        remove_placement_group(group.handle)
        due_s = asyncio.get_running_loop().time() + _REMOVAL_S
        while self._state(group) not in ("REMOVED", None):
            if asyncio.get_running_loop().time() >= due_s:
                raise RoleOperationFailedError(
                    f"Ray has not removed placement group {group.name!r} within {_REMOVAL_S:g} s"
                )
            await asyncio.sleep(_PAUSE_S)

    def nodes_of(self, group: RawGroup) -> Mapping[int, str]:
        """Where its bundles are: node ids by bundle; without those that have no machine now."""
        table = placement_group_table(group.handle)
        placed: dict[int, str] = table.get("bundles_to_node_id", {})
        return {index: node for index, node in placed.items() if node}

    async def places(
        self, group: RawGroup, indices: Sequence[int] | None = None
    ) -> tuple[Place, ...]:
        """Which device each of these bundles (None: all) is, asked of a task that runs there."""
        wanted = range(len(group.bundles)) if indices is None else indices
        answers = await self._on_each(group, wanted)
        addresses = {machine.node_id: machine.address for machine in self.machines()}
        found = []
        for index in wanted:
            node_id, devices, version = answers[index]
            address = addresses.get(node_id, node_id)
            if version != __version__:
                raise ConfigurationError(
                    f"{address} has Phalanx {version}, and this is {__version__}; install the same"
                    " one on every machine"
                )
            if not devices:
                raise ConfigurationError(
                    f"bundle {index} of placement group {group.name!r} has no GPU; give each of its"
                    " bundles one"
                )
            found.append(Place(index, node_id, address, int(devices[0])))
        return tuple(found)

    async def _on_each(
        self, group: RawGroup, indices: Iterable[int]
    ) -> Mapping[int, tuple[str, list[Any], str]]:
        """Of bundles of one machine one after the other: a worker that is there is asked again, and
        each new one takes a second to start.
        """
        nodes = self.nodes_of(group)
        together: dict[str | None, list[int]] = {}
        for index in indices:
            together.setdefault(nodes.get(index), []).append(index)
        answers: dict[int, tuple[str, list[Any], str]] = {}

        async def ask(some: Iterable[int]) -> None:
            for index in some:
                task = ray.remote(_here).options(
                    num_cpus=0,
                    num_gpus=_PROBE_GPUS,
                    max_retries=1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group.handle, index),
                )
                answers[index] = await _answered(task.remote())

        await all_or_first_error(map(ask, together.values()))
        return answers

    async def run_on(self, node_id: str, act: Callable[[A], T], argument: A) -> T:
        """What `act` returns on that machine. Raises `RoleOperationFailedError`."""
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(act).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        answer: T = await _answered(task.remote(argument))
        return answer

    def _state(self, group: RawGroup) -> str | None:
        state: str | None = placement_group_table(group.handle).get("state")
        return state

    def _no_room(self, name: str, bundles: Bundles, timeout_s: float) -> str:
        wanted = sum(bundle.get(GPU, 0) for bundle in bundles)
        return (
            f"placement group {name!r} needs {wanted:g} devices, and within {timeout_s:g} s the"
            f" cluster had {free_devices(self.machines())}"
        )


def bundle(cpus: float, address: str | None = None) -> dict[str, float]:
    """A device and something of a processor, on the machine at `address` or on any."""
    pinned = {} if address is None else {f"node:{address}": _PINNED}
    return {GPU: 1, "CPU": cpus, **pinned}


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts a handler of its own, which ends this process in the middle of whatever it does."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


async def _answered(asked: Awaitable[T]) -> T:
    try:
        return await asked
    except RayError as error:
        raise RoleOperationFailedError(
            f"a machine of the cluster did not answer: {first_line(error)}"
        ) from error


def _here() -> tuple[str, list[Any], str]:
    """Where a task runs, and on what."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[GPU], __version__


def _cluster_that_has_ended() -> ConfigurationError | None:
    """Of the one that Ray takes for this machine's, by a file that outlives it, and would wait minutes
    for; None where it is there, or none was.
    """
    try:
        noted = canonicalize_bootstrap_address(ANY)
    except (ConnectionError, ValueError):
        return None
    reason = "" if noted is None else silence(noted)
    return stale(noted, reason) if reason else None
