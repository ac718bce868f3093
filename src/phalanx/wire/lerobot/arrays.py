"""The numpy and torch globals that pickled observations name, remade from their arguments: numbers
of boolean, integer and floating kinds, as views of the pickle's bytes wherever that is possible.
"""

from __future__ import annotations

import math
import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from phalanx.wire.lerobot.pickle_reader import Budget, Buildable, Function, Refused, Token, Value

Array = NDArray[np.generic]

MAX_DIMENSIONS = 8

NDARRAY: Final = Token("numpy.ndarray")
_CODES = re.compile(r"b1|[iu][1248]|f[248]")
_ORDERS = frozenset("<>=|")


class DtypeValue(Buildable):
    """A numpy dtype: a code such as `u1`, then its byte order."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._order = "="

    def build(self, state: Value) -> None:
        # (version, byte order, ...) where the rest is for structured and object dtypes alone.
        if not isinstance(state, tuple) or len(state) < 5:
            raise Refused("the state of a dtype has not its parts")
        if any(part is not None for part in state[2:5]):
            raise Refused("a dtype has a state that plain numbers have not")
        order = state[1]
        if not isinstance(order, str) or order not in _ORDERS:
            raise Refused("a dtype has an unknown byte order")
        self._order = order

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return np.dtype(self._order.replace("|", "=") + self._code)


class ArrayValue(Buildable):
    """A numpy array whose shape, dtype and bytes come as its state."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._array: Array | None = None

    def build(self, state: Value) -> None:
        if self._array is not None or not isinstance(state, tuple) or len(state) != 5:
            raise Refused("the state of an array has not five parts, or comes twice")
        _, shape, dtype, fortran, data = state
        if not isinstance(fortran, bool):
            raise Refused("the order of an array is neither true nor false")
        self._array = _array(self._budget, data, dtype, shape, "F" if fortran else "C")

    @property
    def array(self) -> Array:
        if self._array is None:
            raise Refused("an array was never given its numbers")
        return self._array


def _dtype(arguments: tuple[Value, ...]) -> Value:
    code = arguments[0] if arguments else None
    if not isinstance(code, str) or len(arguments) > 3 or not _CODES.fullmatch(code[:8]):
        raise Refused(
            "an array is of no plain number type (bool, integer or float of up to 8 bytes); objects, "
            "texts and records are not read"
        )
    return DtypeValue(code)


def _array(budget: Budget, data: Value, dtype: Value, shape: Value, order: str) -> Array:
    if not isinstance(dtype, DtypeValue):
        raise Refused("an array has no dtype")
    if not isinstance(data, memoryview):
        raise Refused("the numbers of an array are no bytes")
    dimensions = lengths(shape)
    kind = dtype.dtype
    wanted = math.prod(dimensions) * kind.itemsize
    if wanted != len(data):
        raise Refused(
            f"an array of shape {dimensions} and {kind} has {len(data)} bytes, not {wanted}"
        )
    if kind == np.bool_ and bytes(data).translate(None, b"\0\1"):
        raise Refused("an array of bool has bytes that are neither 0 nor 1")
    budget.spend_array(wanted)
    flat = np.frombuffer(data, kind) if wanted else np.zeros(0, kind)
    if not kind.isnative:
        flat = flat.astype(kind.newbyteorder("="))
    if order == "F":
        return flat.reshape(dimensions[::-1]).transpose()
    return flat.reshape(dimensions)


def lengths(shape: Value) -> tuple[int, ...]:
    """A shape, or strides: a few integers from 0 on."""
    if not isinstance(shape, tuple) or len(shape) > MAX_DIMENSIONS:
        raise Refused(f"an array's shape is no tuple of at most {MAX_DIMENSIONS} integers")
    checked = []
    for length in shape:
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length < 1 << 40:
            raise Refused("an array's shape has what is no length")
        checked.append(length)
    if math.prod(max(length, 1) for length in checked) >= 1 << 40:
        raise Refused(f"an array's shape {tuple(checked)} is too large")
    return tuple(checked)


def numpy_globals(budget: Budget) -> dict[tuple[str, str], Function | Token]:
    """The numpy globals; arrays spend from `budget`."""

    def reconstruct(arguments: tuple[Value, ...]) -> Value:
        if len(arguments) != 3 or arguments[0] is not NDARRAY:
            raise Refused("an array is of a class other than numpy.ndarray")
        return ArrayValue(budget)

    def from_buffer(arguments: tuple[Value, ...]) -> Value:
        if len(arguments) != 4:
            raise Refused("an array has not four parts")
        data, dtype, shape, order = arguments
        if not isinstance(order, str) or order not in ("C", "F"):
            raise Refused("the order of an array is neither C nor F")
        return _array(budget, data, dtype, shape, order)

    def scalar(arguments: tuple[Value, ...]) -> Value:
        if len(arguments) != 2:
            raise Refused("a number has not two parts")
        return _array(budget, arguments[1], arguments[0], (), "C")[()]

    functions = {
        ("multiarray", "_reconstruct"): Function("_reconstruct", reconstruct),
        ("multiarray", "scalar"): Function("scalar", scalar),
        ("numeric", "_frombuffer"): Function("_frombuffer", from_buffer),
    }
    # Numpy 2 moved its inner modules.
    return {
        ("numpy", "ndarray"): NDARRAY,
        ("numpy", "dtype"): Function("dtype", _dtype),
        **{(f"numpy._core.{module}", name): call for (module, name), call in functions.items()},
        **{(f"numpy.core.{module}", name): call for (module, name), call in functions.items()},
    }
