"""MessagePack in which a map of four known keys is an array, as openpi's client writes it.

An array is `{b"__ndarray__": True, b"data", b"dtype", b"shape"}`, a scalar `{b"__npgeneric__": True,
b"data", b"dtype"}`; keys that are texts are taken as well. Objects are counted, and arrays compared
with their bytes, before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.wire.arrays import array_of

MAX_OBJECTS = 20_000
"""Values of one message, keys and containers included, an array is nine of them; and as many texts
in arrays.
"""
MAX_DEPTH = 32
MAX_KEY_BYTES = 256
"""Of one key; each value below it is called by a path with it."""

ARRAY, SCALAR = "__ndarray__", "__npgeneric__"
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|U[1-9]\d{0,5})")
_FIXED_BYTES = {
    **{0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8},
    **{0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8},
}
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_COUNT_BYTES = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_FIRST_MAP = 0xDE
_LAST_CODE = 0x10FFFF
_SURROGATES = 0xD800 >> 11


def unpack(data: bytes) -> object:
    """The value: None, bool, int, float, str, bytes, list, dict with text keys, or an array.

    Raises `MalformedRequestError` where the bytes are not such a message, and `InvalidRequestError`
    for an array that is not possible.
    """
    _count(data)
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
        raise MalformedRequestError(f"the message is not MessagePack: {error}") from error
    return _Restoring().value(value, "")


def pack(value: object) -> bytes:
    """The message. Raises `InvalidRequestError` for a value that the protocol cannot carry."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"this cannot be sent as MessagePack: {error}") from error


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {
            ARRAY.encode(): True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {
            SCALAR.encode(): True,
            b"data": value.item(),
            b"dtype": value.dtype.str,
        }
    raise TypeError(f"{type(value).__name__} is no value of the protocol")


def _count(data: bytes) -> None:
    """Refuse a message whose objects are too many or too deep, by its headers alone."""
    position, num_objects = 0, 1
    pending = [1]
    while pending:
        if not pending[-1]:
            pending.pop()
            continue
        pending[-1] -= 1
        position, num_children = _header(data, position)
        num_objects += num_children
        if num_objects > MAX_OBJECTS:
            raise MalformedRequestError(
                f"the message has more than {MAX_OBJECTS} values; send arrays as arrays"
            )
        if num_children:
            if len(pending) >= MAX_DEPTH:
                raise MalformedRequestError(f"the message is nested deeper than {MAX_DEPTH}")
            pending.append(num_children)
    if position != len(data):
        raise MalformedRequestError(f"the message goes on for {len(data) - position} bytes")


def _header(data: bytes, position: int) -> tuple[int, int]:
    """Where the value at `position` ends, or its first child begins; and how many of those."""
    if position >= len(data):
        raise MalformedRequestError("the message ends before its last value")
    code = data[position]
    position += 1
    if code <= 0x7F or code >= 0xE0:
        return position, 0
    if code <= 0x8F:
        return position, 2 * (code & 0x0F)
    if code <= 0x9F:
        return position, code & 0x0F
    if code <= 0xBF:
        return _after(data, position, code & 0x1F), 0
    if code in _FIXED_BYTES:
        return _after(data, position, _FIXED_BYTES[code]), 0
    if code in _LENGTH_BYTES:
        position, length = _number(data, position, _LENGTH_BYTES[code])
        return _after(data, position, length), 0
    if code in _COUNT_BYTES:
        position, count = _number(data, position, _COUNT_BYTES[code])
        return position, count * (2 if code >= _FIRST_MAP else 1)
    raise MalformedRequestError(f"the message has an extension type (code 0x{code:02x})")


def _number(data: bytes, position: int, num_bytes: int) -> tuple[int, int]:
    end = _after(data, position, num_bytes)
    return end, int.from_bytes(data[position:end], "big")


def _after(data: bytes, position: int, num_bytes: int) -> int:
    if position + num_bytes > len(data):
        raise MalformedRequestError("the message ends within a value")
    return position + num_bytes


class _Restoring:
    """Of the arrays of one message, whose texts are counted together."""

    def __init__(self) -> None:
        self._num_texts = 0

    def value(self, value: object, path: str) -> object:
        if isinstance(value, list):
            return [self.value(each, f"{path}[{index}]") for index, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        named = _named(value, path)
        if named.get(ARRAY):
            return self._array(named, path)
        if named.get(SCALAR):
            return _scalar(named, path)
        return {
            key: self.value(each, f"{path}/{key}" if path else key) for key, each in named.items()
        }

    def _array(self, named: Mapping[str, object], path: str) -> object:
        array = _array(named, path)
        if array.dtype.kind != "U":
            return array.astype(array.dtype.newbyteorder("="), copy=False)
        self._num_texts += array.size
        if self._num_texts > MAX_OBJECTS:
            raise InvalidRequestError(
                f"{path or 'the array'} has {array.size} texts; at most {MAX_OBJECTS} are taken in "
                "one message",
                field=path,
            )
        return _texts(array, path)


def _named(value: Mapping[object, object], path: str) -> dict[str, object]:
    named: dict[str, object] = {}
    for key, each in value.items():
        name = key.decode("utf-8", "replace") if isinstance(key, bytes) else key
        if not isinstance(name, str):
            raise MalformedRequestError(
                f"{path or 'the message'} has the key {key!r}; keys are texts", field=path
            )
        if len(name.encode("utf-8", "replace")) > MAX_KEY_BYTES:
            raise MalformedRequestError(
                f"{path or 'the message'} has the key {name[:40]!r}... of more than "
                f"{MAX_KEY_BYTES} bytes",
                field=path,
            )
        named[name] = each
    return named


def _array(named: Mapping[str, object], path: str) -> NDArray[np.generic]:
    data, shape = named.get("data"), named.get("shape")
    if not isinstance(data, bytes) or not isinstance(shape, list):
        raise MalformedRequestError(
            f"{path or 'the message'} is an array without data (bytes) and shape (a list)",
            field=path,
        )
    if not all(type(size) is int for size in shape):
        raise MalformedRequestError(
            f"{path} has the shape {shape!r:.80}; give integers", field=path
        )
    dtype = _dtype(named.get("dtype"), path)
    return array_of(data, dtype, cast(list[int], shape), path or "the array")


def _texts(array: NDArray[np.generic], path: str) -> object:
    """An array of texts as lists; of no dimension, as one text."""
    # numpy makes texts of any number, and of some fails beyond repair.
    codes = np.frombuffer(array.tobytes(), np.uint32 if array.dtype.isnative else ">u4")
    if codes.size and (codes.max() > _LAST_CODE or ((codes >> 11) == _SURROGATES).any()):
        raise InvalidRequestError(
            f"{path or 'the array'} has a text that is not Unicode", field=path
        )
    return array.tolist()


def _scalar(named: Mapping[str, object], path: str) -> object:
    """A scalar as Python's own; its exact type is of no use to a policy."""
    _dtype(named.get("dtype"), path)
    data = named.get("data")
    if not isinstance(data, bool | int | float | str):
        raise MalformedRequestError(
            f"{path or 'the message'} is a scalar without a number", field=path
        )
    return data


def _dtype(name: object, path: str) -> np.dtype[np.generic]:
    text = name.decode("latin-1") if isinstance(name, bytes) else name
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise InvalidRequestError(
            f"{path or 'the array'} has dtype {text!r:.60}; send bool, integers, floats or texts",
            field=path,
        )
    return np.dtype(text)
