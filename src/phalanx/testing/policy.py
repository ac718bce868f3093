"""Fake robot policies, which do what an observation's instruction tells them.

Their actions are a plain sum, so that a test knows them: `fake_actions`. The instruction may be a
command instead: `hold` waits at the gate, `meet N` until N requests are in the model at once, `ticks N` for N steps, `fifo
PATH` until the other end of the FIFO has been opened and closed; `fail`, `oom` and `nan` go wrong in
the model, `break` breaks it; `adapter-fail`, `adapter-hold`, `actions-fail`, `actions-rows` and
`actions-hold` are for the adapter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.plugin import BatchingEntry, Entry, Event, Failed, Final, Scheduled
from phalanx.schema.limits import Limits
from phalanx.schema.observation import Actions, Observation, PolicyInfo

__all__ = [
    "FakePolicy",
    "FakePolicyAdapter",
    "FakePolicyArgs",
    "FakePolicyEntry",
    "FakePolicyRequest",
    "Gate",
    "fake_actions",
]


class Gate:
    """Holds requests until it is opened; `passed` is told what arrives at it."""

    def __init__(self, passed: Callable[[str], None] | None = None) -> None:
        self._open = threading.Event()
        self._passed = passed
        self._wakes: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def open(self) -> None:
        self._open.set()
        for wake in self._wakes:
            wake()

    def arrive(self, what: str) -> None:
        if self._passed is not None:
            self._passed(what)

    def wait(self) -> None:
        self._open.wait()

    def wake_with(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)


@dataclass(frozen=True)
class FakePolicyArgs(EntryArgs):
    """`checkpoint_dir` is looked at by nobody. Requests of more than `max_batch_size` rows are
    refused. The gate does not cross to other processes."""

    checkpoint_dir: str | Path | None = None
    cameras: tuple[str, ...] = ("front", "wrist")
    state_dim: int = 4
    action_dim: int = 3
    horizon: int = 5
    max_batch_size: int = 8
    gate: Gate | None = None


@dataclass(frozen=True, eq=False)
class FakePolicyRequest:
    """`sums`: float64 of shape (B,), what the policy reduces each row to."""

    sums: NDArray[np.float64]
    command: str = ""


def fake_actions(args: FakePolicyArgs, observation: Observation) -> NDArray[np.float32]:
    """What the fake policies answer, of shape (B, horizon, action_dim)."""
    return _actions(args, _sums(observation))[:, : observation.horizon]


class FakePolicyAdapter:
    """`image_names` are the cameras' names to clients, in the policy's order."""

    def __init__(self, args: FakePolicyArgs, image_names: tuple[str, ...] | None = None) -> None:
        self._args = args
        self._cameras = image_names or args.cameras

    @property
    def info(self) -> PolicyInfo:
        args = self._args
        return PolicyInfo(
            "fake_policy", self._cameras, args.state_dim, args.action_dim, args.horizon
        )

    def request(self, observation: Observation) -> FakePolicyRequest:
        command = observation.instructions[0]
        _obey(self._args, command, "adapter")
        for name in observation.images:
            if name not in self._cameras:
                raise InvalidRequestError(
                    f"camera {name!r} is not one of the policy's: {', '.join(self._cameras)}",
                    field=name,
                )
        for name, array in observation.inputs.items():
            raise InvalidRequestError(
                f"input {name!r} of shape {array.shape} is nothing that the policy takes",
                field=name,
            )
        state = observation.state
        if state is not None and state.shape[-1] != self._args.state_dim:
            raise InvalidRequestError(
                f"the state has {state.shape[-1]} numbers; the policy takes {self._args.state_dim}",
                field="state",
            )
        return FakePolicyRequest(_sums(observation), command)

    def actions(self, output: NDArray[np.float32], observation: Observation) -> Actions:
        _obey(self._args, observation.instructions[0], "actions")
        values = output[:, : observation.horizon]
        if observation.instructions[0] == "actions-rows":
            values = np.concatenate([values, values])
            return Actions(values)
        return Actions(values if observation.batched else values[0])


class _FakePlugin:
    """What both kinds share."""

    args_cls: ClassVar[type[EntryArgs]] = FakePolicyArgs
    request_cls: ClassVar[type[Any]] = FakePolicyRequest
    output_cls: ClassVar[type[Any]] = np.ndarray

    @staticmethod
    def validate(request: FakePolicyRequest, limits: Limits) -> None:
        most = limits.max_batch_size
        if most is not None and len(request.sums) > most:
            raise InvalidRequestError(
                f"a batch of {len(request.sums)} rows; at most {most} are taken",
                field="instructions",
            )

    @classmethod
    def policy(cls, args: FakePolicyArgs, settings: Mapping[str, Any]) -> FakePolicyAdapter:
        unknown = sorted(set(settings) - {"image_names"})
        if unknown:
            raise ConfigurationError(f"unknown key {unknown[0]}; allowed: image_names")
        names = settings.get("image_names")
        return FakePolicyAdapter(args, None if names is None else tuple(names))


class FakePolicyEntry(_FakePlugin, Entry):
    """Computes one request at a time."""

    name = "fake_policy_entry"

    def setup(self, args: FakePolicyArgs) -> None:
        self._args = args

    @property
    def limits(self) -> Limits:
        return Limits(max_batch_size=self._args.max_batch_size)

    def step(self, request: FakePolicyRequest) -> NDArray[np.float32]:
        command = request.command
        if command == "hold":
            _gate(self._args).arrive(command)
            _gate(self._args).wait()
        _raise_if_told(command)
        return _computed(self._args, request)


@dataclass
class _State:
    running: dict[str, FakePolicyRequest] = field(default_factory=dict)
    num_ticks: dict[str, int] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)


class FakePolicy(_FakePlugin, BatchingEntry):
    """Computes all requests that it has at once."""

    name = "fake_policy"

    def setup(self, args: FakePolicyArgs) -> None:
        self._args = args
        self._state = _State()

    @property
    def limits(self) -> Limits:
        return Limits(max_batch_size=self._args.max_batch_size)

    def wake_with(self, wake: Callable[[], None]) -> None:
        if self._args.gate is not None:
            self._args.gate.wake_with(wake)

    def start(self, rid: str, request: FakePolicyRequest) -> None:
        self._state.running[rid] = request

    def cancel(self, rid: str) -> None:
        if rid in self._state.running:
            self._state.cancelled.append(rid)

    @property
    def busy(self) -> bool:
        state = self._state
        return bool(state.cancelled) or any(
            rid not in state.num_ticks
            or request.command.startswith("ticks ")
            or self._can_go(rid, request)
            for rid, request in state.running.items()
        )

    def tick(self) -> list[Event]:
        state = self._state
        events: list[Event] = []
        for rid in state.cancelled:
            request = state.running.pop(rid, None)
            state.num_ticks.pop(rid, None)
            if request is not None:
                self._arrived(f"cancelled {request.command}")
                none = _actions(self._args, request.sums)[:, :0]
                events.append(Final(rid, none, cancelled=True))
        state.cancelled.clear()
        for rid, request in state.running.items():
            if rid not in state.num_ticks:
                events.append(Scheduled(rid))
                self._arrived(request.command)
            state.num_ticks[rid] = state.num_ticks.get(rid, 0) + 1
        going = {rid: one for rid, one in state.running.items() if self._can_go(rid, one)}
        for rid, request in going.items():
            del state.running[rid]
            del state.num_ticks[rid]
            if request.command == "break":
                raise RuntimeError("secret: broken as it was told to")
            try:
                _raise_if_told(request.command)
            except (RuntimeError, MemoryError) as error:
                events.append(Failed(rid, error))
            else:
                events.append(Final(rid, _computed(self._args, request)))
        return events

    def _arrived(self, what: str) -> None:
        if self._args.gate is not None and what:
            self._args.gate.arrive(what)

    def _can_go(self, rid: str, request: FakePolicyRequest) -> bool:
        word, _, number = request.command.partition(" ")
        match word:
            case "hold":
                return _gate(self._args).is_open
            case "meet":
                running = self._state.running.values()
                return sum(one.command == request.command for one in running) >= int(number)
            case "ticks":
                return self._state.num_ticks.get(rid, 0) >= int(number)
        return True


def _gate(args: FakePolicyArgs) -> Gate:
    if args.gate is None:
        raise InvalidRequestError("this fake has no gate to hold a request at")
    return args.gate


def _obey(args: FakePolicyArgs, command: str, where: str) -> None:
    if command == f"{where}-fail":
        raise KeyError("secret: the adapter fails as it was told to")
    if command == f"{where}-hold":
        _gate(args).arrive(command)
        _gate(args).wait()


def _raise_if_told(command: str) -> None:
    word, _, path = command.partition(" ")
    if word == "fifo":
        Path(path).read_bytes()
    if word == "fail":
        raise RuntimeError("secret: the model fails as it was told to")
    if word == "oom":
        raise MemoryError("secret: 80 GiB")


def _computed(args: FakePolicyArgs, request: FakePolicyRequest) -> NDArray[np.float32]:
    actions = _actions(args, request.sums)
    if request.command == "nan":
        actions[0, 1, 0] = np.nan
    return actions


def _sums(observation: Observation) -> NDArray[np.float64]:
    rows = observation.num_rows
    total = np.zeros(rows)
    if observation.state is not None:
        total += observation.state.reshape(rows, -1).astype(np.float64).sum(1)
    for image in observation.images.values():
        total += image.reshape(rows, -1).mean(1)
    return total


def _actions(args: FakePolicyArgs, sums: NDArray[np.float64]) -> NDArray[np.float32]:
    steps = np.arange(args.horizon)[:, None] + np.arange(args.action_dim) / 16
    return (sums[:, None, None] + steps).astype(np.float32)
