"""What LeRobot's client pickles, as checked values: its policy's settings, and a timed observation;
and the timed actions that it takes, for tests and clients of our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import MalformedRequestError
from phalanx.wire.lerobot.arrays import Array, ArrayValue, numpy_globals
from phalanx.wire.lerobot.features import Allowance, Features, decode_features, plain
from phalanx.wire.lerobot.messages import MAX_MESSAGE_BYTES
from phalanx.wire.lerobot.pickle_reader import (
    MAX_OPCODES,
    Budget,
    Globals,
    PickleReader,
    Record,
    RecordClass,
    Refused,
    Value,
)
from phalanx.wire.lerobot.tensors import torch_globals

MODULES: Final = ("lerobot.async_inference.helpers", "lerobot.scripts.server.helpers")
"""Where the client's classes are: since 0.4.0, and before. Answers name the client's own."""

MAX_TIMESTEP: Final = 1 << 53
MAX_ACTIONS_PER_CHUNK: Final = 100_000
MAX_NAME: Final = 4096
"""Characters of each of the texts by which a client names its policy and device."""

_CONFIG: Final = "RemotePolicyConfig"
_OBSERVATION: Final = "TimedObservation"
_ACTION: Final = "TimedAction"
_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    _CONFIG: frozenset(
        {
            "policy_type",
            "pretrained_name_or_path",
            "lerobot_features",
            "actions_per_chunk",
            "device",
            "rename_map",
        }
    ),
    _OBSERVATION: frozenset({"timestamp", "timestep", "observation", "must_go"}),
    _ACTION: frozenset({"timestamp", "timestep", "action"}),
}

Sensor = float | str | Array
"""One entry of an observation: a joint, the task, or a camera's image."""


@dataclass(frozen=True)
class PolicyInstructions:
    """A client's `RemotePolicyConfig`. `model` is its `pretrained_name_or_path`; `module` is where
    the client's classes are.
    """

    model: str
    policy_type: str
    features: Features
    actions_per_chunk: int
    device: str
    rename_map: Mapping[str, str]
    module: str


@dataclass(frozen=True, eq=False)
class TimedObservation:
    """What a robot saw at `timestamp_s` of its own clock, after the action number `timestep`.

    `must_go`: the robot has no actions left and waits.
    """

    timestamp_s: float
    timestep: int
    sensors: Mapping[str, Sensor]
    must_go: bool


@dataclass(frozen=True, eq=False)
class TimedAction:
    """One action for the robot, which it takes as number `timestep`."""

    timestamp_s: float
    timestep: int
    values: NDArray[np.float32]


def decode_policy_instructions(data: bytes | memoryview) -> PolicyInstructions:
    """Raises `MalformedRequestError`."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedRequestError(
            f"the policy instructions have {len(data)} bytes; LeRobot's client sends "
            f"{MAX_MESSAGE_BYTES} at most"
        )
    record = _record(data, _CONFIG)
    allowance = Allowance()
    actions = _integer(record, "actions_per_chunk")
    if not 1 <= actions <= MAX_ACTIONS_PER_CHUNK:
        raise MalformedRequestError(
            f"actions_per_chunk={actions} must be from 1 to {MAX_ACTIONS_PER_CHUNK}",
            field="actions_per_chunk",
        )
    rename = plain(record.fields.get("rename_map", {}), "rename_map", allowance)
    if not isinstance(rename, dict) or not all(isinstance(name, str) for name in rename.values()):
        raise MalformedRequestError(
            "rename_map is no dictionary from text to text", field="rename_map"
        )
    return PolicyInstructions(
        model=_text(record, "pretrained_name_or_path"),
        policy_type=_text(record, "policy_type"),
        features=decode_features(record.fields.get("lerobot_features"), allowance),
        actions_per_chunk=actions,
        device=_text(record, "device", "cpu"),
        rename_map={name: str(to) for name, to in rename.items()},
        module=record.record_class.module,
    )


def decode_observation(data: bytes | memoryview) -> TimedObservation:
    """Raises `MalformedRequestError`. Arrays are views of `data`."""
    record = _record(data, _OBSERVATION)
    sensors = record.fields.get("observation")
    if not isinstance(sensors, dict):
        raise MalformedRequestError("the observation is no dictionary", field="observation")
    must_go = record.fields.get("must_go", False)
    if not isinstance(must_go, bool):
        raise MalformedRequestError("must_go is neither true nor false", field="must_go")
    return TimedObservation(
        timestamp_s=_timestamp(record),
        timestep=_timestep(record),
        sensors={name: _sensor(name, value) for name, value in sensors.items()},
        must_go=must_go,
    )


def decode_actions(data: bytes | memoryview) -> list[TimedAction]:
    """The answer to `GetActions`. Raises `MalformedRequestError`."""
    values = _read(data, _ACTION, opcodes=2 * MAX_OPCODES)
    if not isinstance(values, list):
        raise MalformedRequestError("the actions are no list")
    return [_action(value) for value in values]


def _action(value: Value) -> TimedAction:
    if not isinstance(value, Record):
        raise MalformedRequestError(f"the list holds what is no {_ACTION}")
    numbers = value.fields.get("action")
    if not isinstance(numbers, np.ndarray) or numbers.ndim != 1 or numbers.dtype != np.float32:
        raise MalformedRequestError("an action is no tensor of float32", field="action")
    return TimedAction(_timestamp(value), _timestep(value), numbers)


def _read(data: bytes | memoryview, name: str, *, opcodes: int = MAX_OPCODES) -> Value:
    view = memoryview(data)
    if len(view) < 2 or view[0] != 0x80:
        raise MalformedRequestError(
            f"the {name} is no pickle: LeRobot's clients up to 0.6 send one; use such a client, or "
            "Phalanx's own"
        )
    budget = Budget(len(view), opcodes)
    allowed: Globals = {
        **numpy_globals(budget),
        **torch_globals(budget),
        **{(module, name): RecordClass(module, name, _FIELDS[name]) for module in MODULES},
    }
    reader = PickleReader(view, allowed, budget)
    value = reader.read()
    if reader.position != len(view):
        raise MalformedRequestError(
            f"the {name} has {len(view) - reader.position} bytes after its end"
        )
    return value


def _record(data: bytes | memoryview, name: str) -> Record:
    value = _read(data, name)
    if not isinstance(value, Record):
        raise MalformedRequestError(f"the pickle is no {name}")
    return value


def _sensor(name: str, value: Value) -> Sensor:
    try:
        if isinstance(value, ArrayValue):
            return value.array
    except Refused as error:
        raise MalformedRequestError(f"{name[:80]!r}: {error}", field=name[:80]) from None
    if isinstance(value, bool | int | np.generic):
        return float(value)
    if isinstance(value, float | str | np.ndarray):
        return value
    raise MalformedRequestError(
        f"the observation's {name[:80]!r} is neither a number nor an array nor a text",
        field=name[:80],
    )


def _text(record: Record, name: str, default: str | None = None) -> str:
    value = record.fields.get(name, default)
    if not isinstance(value, str):
        raise MalformedRequestError(f"{name} is no text", field=name)
    if len(value) > MAX_NAME:
        raise MalformedRequestError(
            f"{name} has {len(value)} characters; at most {MAX_NAME} are taken", field=name
        )
    return value


def _integer(record: Record, name: str) -> int:
    value = record.fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedRequestError(f"{name} is no integer", field=name)
    return value


def _timestep(record: Record) -> int:
    value = _integer(record, "timestep")
    if not 0 <= value <= MAX_TIMESTEP:
        raise MalformedRequestError(
            f"timestep={value} must be from 0 to {MAX_TIMESTEP}", field="timestep"
        )
    return value


def _timestamp(record: Record) -> float:
    value = record.fields.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MalformedRequestError("timestamp is no finite number", field="timestamp")
    return float(value)
