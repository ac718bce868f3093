"""The answer to `GetActions`: a pickled list of `TimedAction`, whose tensors are rows of one storage.

LeRobot's server pickles each row with the storage of all rows, which grows with the square of the
chunk; here the storage comes once, so that an answer is little more than its numbers.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError
from phalanx.wire.lerobot.tensors import FORMAT_VERSION, MAGIC

_PROTOCOL = b"\x80\x04"
_STOP = b"."

_F8 = struct.Struct(">d")
_I4 = struct.Struct("<i")
_U4 = struct.Struct("<I")
_U8 = struct.Struct("<Q")

# Where in the memo the parts are that every row names again.
_ACTION, _TIMESTAMP, _TIMESTEP, _VALUES, _REBUILD, _STORAGE, _SIZE, _STRIDE, _HOOKS = range(9)


def encode_actions(
    values: NDArray[np.float32], timestamp_s: float, timestep: int, fps: float, module: str
) -> bytes:
    """`values` of shape (horizon, action_dim): action i is number `timestep + i`, to be taken at
    `timestamp_s + i / fps`. `module` is where the client's classes are.
    """
    if values.ndim != 2 or values.dtype != np.float32:
        raise InvalidRequestError(
            f"the actions are {values.dtype} of shape {values.shape}; a robot takes float32 of shape "
            "(horizon, action_dim)"
        )
    action_dim = values.shape[1]
    parts = _Parts(values, module)
    pieces = [_PROTOCOL, b"]("]
    for index in range(len(values)):
        pieces += [
            parts.next(_ACTION) + b")\x81}(",
            parts.next(_TIMESTAMP) + b"G" + _F8.pack(timestamp_s + index / fps),
            parts.next(_TIMESTEP) + _integer(timestep + index),
            parts.next(_VALUES) + parts.next(_REBUILD) + b"(" + parts.next(_STORAGE),
            _integer(index * action_dim) + parts.next(_SIZE) + parts.next(_STRIDE),
            b"\x89" + parts.next(_HOOKS) + b"tRub",
        ]
    pieces += [b"e", _STOP]
    return b"".join(pieces)


class _Parts:
    """What every row names: made and put into the memo the first time, taken from there later."""

    def __init__(self, values: NDArray[np.float32], module: str) -> None:
        storage = _storage(np.ascontiguousarray(values).reshape(-1))
        self._unmade = {
            _ACTION: _global(module, "TimedAction"),
            _TIMESTAMP: _text("timestamp"),
            _TIMESTEP: _text("timestep"),
            _VALUES: _text("action"),
            _REBUILD: _global("torch._utils", "_rebuild_tensor_v2"),
            _STORAGE: _global("torch.storage", "_load_from_bytes")
            + b"B"
            + _U4.pack(len(storage))
            + storage
            + b"\x85R",
            _SIZE: _integer(values.shape[1]) + b"\x85",
            _STRIDE: _integer(1) + b"\x85",
            _HOOKS: _global("collections", "OrderedDict") + b")R",
        }

    def next(self, index: int) -> bytes:
        made = self._unmade.pop(index, None)
        return b"h" + bytes([index]) if made is None else made + b"q" + bytes([index])


def _storage(numbers: NDArray[np.float32]) -> bytes:
    """As `torch.save` writes a storage in its old form: five pickles, the count, the numbers."""
    key = _long_text("0")
    system = (
        b"}("
        + _long_text("protocol_version")
        + b"M"
        + struct.pack("<H", FORMAT_VERSION)
        + _long_text("little_endian")
        + b"\x88"
        + _long_text("type_sizes")
        + b"}("
        + b"".join(
            _long_text(name) + b"K" + bytes([size])
            for name, size in (("short", 2), ("int", 4), ("long", 4))
        )
        + b"uu"
    )
    described = (
        b"("
        + _long_text("storage")
        + b"ctorch\nFloatStorage\n"
        + key
        + _long_text("cpu")
        + _integer(len(numbers))
        + b"NtQ"
    )
    pickles = (
        b"\x8a\x0a" + MAGIC.to_bytes(10, "little"),
        b"M" + struct.pack("<H", FORMAT_VERSION),
        system,
        described,
        b"]" + key + b"a",
    )
    head = b"".join(b"\x80\x02" + pickled + _STOP for pickled in pickles)
    return head + _U8.pack(len(numbers)) + numbers.astype("<f4", copy=False).tobytes()


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"\x8c" + bytes([len(encoded)]) + encoded


def _long_text(text: str) -> bytes:
    """Protocol 2 knows no short texts."""
    encoded = text.encode()
    return b"X" + _U4.pack(len(encoded)) + encoded


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if value < 1 << 31:
        return b"J" + _I4.pack(value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
