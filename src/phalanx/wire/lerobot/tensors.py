"""The torch globals that pickled observations and actions name, without torch: a storage, which is a
`torch.save` file of the old form inside the pickle, and tensors as views of one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from phalanx.wire.lerobot.arrays import Array, lengths
from phalanx.wire.lerobot.pickle_reader import (
    Budget,
    Function,
    Globals,
    PickleReader,
    Refused,
    Token,
    Value,
)

MAGIC: Final = 0x1950A86A20F9469CFC6C
FORMAT_VERSION: Final = 1001

_STORAGES: Final[Mapping[str, str]] = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": "<u2",
    "ByteStorage": "|u1",
    "CharStorage": "|i1",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
    "BoolStorage": "|b1",
}
_CLASSES = {name: Token(f"torch.{name}") for name in _STORAGES}
_INNER: Final[Globals] = {("torch", name): token for name, token in _CLASSES.items()}
_COUNT = struct.Struct("<q")


@dataclass(frozen=True, eq=False)
class Storage:
    """The numbers of a tensor, flat."""

    numbers: Array


@dataclass(frozen=True)
class _Declared:
    """What the storage's pickle says of it, before its numbers."""

    name: str
    key: str
    num_numbers: int


def torch_globals(budget: Budget) -> dict[tuple[str, str], Function | Token]:
    """The torch globals; nested pickles spend from `budget`."""

    def load(arguments: tuple[Value, ...]) -> Value:
        if len(arguments) != 1 or not isinstance(arguments[0], memoryview):
            raise Refused("a storage is no bytes")
        return _storage(arguments[0], budget)

    return {
        ("torch.storage", "_load_from_bytes"): Function("_load_from_bytes", load),
        ("torch._utils", "_rebuild_tensor_v2"): Function("_rebuild_tensor_v2", _tensor),
        ("collections", "OrderedDict"): Function("OrderedDict", _no_hooks),
    }


def _no_hooks(arguments: tuple[Value, ...]) -> Value:
    # Only ever the place of a tensor's hooks, of which a sent tensor has none.
    if arguments:
        raise Refused("an OrderedDict has entries")
    return {}


def _storage(data: memoryview, budget: Budget) -> Storage:
    """Four pickles (magic number, version, the writer's system, the storage), a list of keys in a
    fifth, then how many numbers there are, and they.
    """
    position = 0

    def read(allowed: Globals, *, persistent: bool = False) -> Value:
        nonlocal position
        reader = PickleReader(
            data,
            allowed,
            budget,
            position=position,
            persistent=_declared if persistent else None,
        )
        value = reader.read()
        position = reader.position
        return value

    if (read({}), read({})) != (MAGIC, FORMAT_VERSION):
        raise Refused("a storage is not in the form in which torch pickles one")
    system = read({})
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Refused("a storage is not little-endian")
    declared = read(_INNER, persistent=True)
    if not isinstance(declared, _Declared) or read({}) != [declared.key]:
        raise Refused("a storage has more or less than one part")
    return _numbers(data[position:], declared, budget)


def _declared(key: Value) -> Value:
    if not isinstance(key, tuple) or len(key) != 6:
        raise Refused("a storage has not six parts")
    kind, cls, name, _, num_numbers, view = key
    if kind != "storage" or not isinstance(cls, Token) or view is not None:
        raise Refused("a storage is of a kind that is not read")
    if not isinstance(name, str) or not isinstance(num_numbers, int) or num_numbers < 0:
        raise Refused("a storage has a wrong key or size")
    return _Declared(cls.name.removeprefix("torch."), name, num_numbers)


def _numbers(data: memoryview, declared: _Declared, budget: Budget) -> Storage:
    kind = np.dtype(_STORAGES[declared.name])
    wanted = _COUNT.size + declared.num_numbers * kind.itemsize
    if len(data) != wanted or _COUNT.unpack(data[: _COUNT.size])[0] != declared.num_numbers:
        raise Refused(
            f"a storage of {declared.num_numbers} numbers has {len(data)} bytes, not {wanted}"
        )
    if declared.num_numbers == 0:
        return Storage(np.zeros(0, kind))
    budget.spend_array(len(data))
    numbers = np.frombuffer(data, kind, offset=_COUNT.size)
    if declared.name == "BFloat16Storage":
        return Storage((numbers.astype(np.uint32) << 16).view(np.float32))
    if kind == np.bool_ and numbers.view(np.uint8).max() > 1:
        raise Refused("a storage of bool has bytes that are neither 0 nor 1")
    return Storage(numbers)


def _tensor(arguments: tuple[Value, ...]) -> Array:
    """(storage, offset, size, stride, requires_grad, hooks), and metadata in a seventh place."""
    if not 6 <= len(arguments) <= 7 or not isinstance(arguments[0], Storage):
        raise Refused("a tensor has not six parts, or no storage")
    numbers, offset = arguments[0].numbers, arguments[1]
    size, stride = lengths(arguments[2]), lengths(arguments[3])
    if not isinstance(offset, int) or offset < 0 or len(size) != len(stride):
        raise Refused("a tensor has a wrong offset or wrong strides")
    total = math.prod(size)
    if total == 0:
        return np.zeros(size, numbers.dtype)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if last >= len(numbers) or total > len(numbers):
        raise Refused(f"a tensor of shape {size} is not within its {len(numbers)} numbers")
    steps = tuple(step * numbers.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(numbers[offset:], size, steps, writeable=False)
