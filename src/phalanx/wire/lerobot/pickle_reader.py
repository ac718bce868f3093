"""Reads the pickles of LeRobot's clients without Python's unpickler: a machine that knows the
opcodes which those clients write, and calls nothing but the functions of an allow-list.

Work and memory are bounded by the number of opcodes and the size of the data, of which byte strings
are views; nothing that the data claims is allocated before it is there.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn

from phalanx.errors import MalformedRequestError

MAX_OPCODES = 20_000
MAX_TEXT_BYTES = 1024 * 1024
"""Of all texts together, which take up to four times as much memory."""
MAX_NAME_BYTES = 128
MAX_INTEGER_BYTES = 16
PROTOCOLS = range(2, 6)

Value = object
"""None, bool, int, float, str, memoryview, list, tuple, dict, or what an allowed global makes."""


class Refused(Exception):
    """What the pickle asks for is not allowed; the machine adds where."""


@dataclass(frozen=True)
class Function:
    """A global that may be called. `call` takes the arguments and raises `Refused`."""

    name: str
    call: Callable[[tuple[Value, ...]], Value]


@dataclass(frozen=True)
class Token:
    """A global that may be named as an argument and not be called, such as `numpy.ndarray`."""

    name: str


@dataclass(frozen=True)
class RecordClass:
    """A class whose instances are made with their fields and nothing else."""

    module: str
    name: str
    fields: frozenset[str]


@dataclass
class Record:
    """An instance of a `RecordClass`; its fields are what the pickle says, not yet checked."""

    record_class: RecordClass
    fields: dict[str, Value] = field(default_factory=dict)

    def build(self, state: Value) -> None:
        name = self.record_class.name
        if self.fields or not isinstance(state, dict):
            raise Refused(f"the state of {name} is no dictionary, or comes twice")
        unknown = sorted(set(state) - self.record_class.fields)
        if unknown:
            raise Refused(f"{name} has the unknown field {unknown[0][:80]!r}")
        self.fields = state


class Buildable(ABC):
    """What an allowed function made and the pickle then gives a state."""

    @abstractmethod
    def build(self, state: Value) -> None:
        """Take the state; `Refused` where it is none of its kind."""


Globals = Mapping[tuple[str, str], Function | Token | RecordClass]


class Budget:
    """What a pickle of `num_bytes` and those nested in it may take together.

    Each byte may be in one array, so that many arrays of the same bytes cannot be asked for.
    """

    def __init__(self, num_bytes: int, opcodes: int = MAX_OPCODES) -> None:
        self._array_bytes = num_bytes
        self._opcodes = opcodes
        self._text_bytes = MAX_TEXT_BYTES

    def spend_opcode(self) -> None:
        self._opcodes -= 1
        if self._opcodes < 0:
            raise Refused("it has too many opcodes")

    def spend_text(self, num_bytes: int) -> None:
        self._text_bytes -= num_bytes
        if self._text_bytes < 0:
            raise Refused("it has too much text")

    def spend_array(self, num_bytes: int) -> None:
        self._array_bytes -= num_bytes
        if self._array_bytes < 0:
            raise Refused("its arrays are larger than itself")


_U2 = struct.Struct("<H")
_I4 = struct.Struct("<i")
_U4 = struct.Struct("<I")
_U8 = struct.Struct("<Q")
_F8 = struct.Struct(">d")
_NOTHING: Final = object()


class PickleReader:
    """One pickle at `position` of `data`. `read` gives its value and leaves `position` behind it.

    `persistent` makes the value of a persistent id, which only a pickle inside a tensor has.
    """

    def __init__(
        self,
        data: memoryview,
        allowed: Globals,
        budget: Budget,
        *,
        position: int = 0,
        persistent: Callable[[Value], Value] | None = None,
    ) -> None:
        self.position = position
        self._data = data
        self._allowed = allowed
        self._budget = budget
        self._persistent = persistent
        self._stack: list[Value] = []
        self._marks: list[int] = []
        self._memo: dict[int, Value] = {}

    def read(self) -> Value:
        """Raises `MalformedRequestError` for everything that is not allowed."""
        while True:
            start = self.position
            try:
                self._budget.spend_opcode()
                opcode = self._byte()
                if opcode == _STOP:
                    return self._result()
                handler = _HANDLERS.get(opcode)
                if handler is None:
                    raise Refused(f"the opcode 0x{opcode:02x} is not allowed")
                handler(self)
            except Refused as error:
                self._fail(start, str(error))

    def _fail(self, where: int, why: str) -> NoReturn:
        raise MalformedRequestError(f"the pickle is refused at byte {where}: {why}") from None

    def _result(self) -> Value:
        if len(self._stack) != 1 or self._marks:
            raise Refused("it stops with more or less than one value")
        return self._stack[0]

    # Reading the data.

    def _take(self, num_bytes: int) -> memoryview:
        end = self.position + num_bytes
        if end > len(self._data):
            raise Refused(f"it ends {end - len(self._data)} bytes too early")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def _byte(self) -> int:
        return self._take(1)[0]

    def _u2(self) -> int:
        return int(_U2.unpack(self._take(2))[0])

    def _u4(self) -> int:
        return int(_U4.unpack(self._take(4))[0])

    def _u8(self) -> int:
        return int(_U8.unpack(self._take(8))[0])

    def _line(self) -> str:
        rest = bytes(self._data[self.position : self.position + MAX_NAME_BYTES + 1])
        end = rest.find(b"\n")
        if end < 0:
            raise Refused("a name does not end, or is too long")
        self.position += end + 1
        return _decoded(memoryview(rest)[:end])

    def _text(self, num_bytes: int) -> None:
        self._budget.spend_text(num_bytes)
        self._push(_decoded(self._take(num_bytes)))

    # The stack.

    def _push(self, value: Value) -> None:
        self._stack.append(value)

    def _pop(self) -> Value:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise Refused("it takes a value that is not there")
        return self._stack.pop()

    def _top(self) -> Value:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise Refused("it takes a value that is not there")
        return self._stack[-1]

    def _since_mark(self) -> list[Value]:
        if not self._marks:
            raise Refused("it has no mark")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    # Opcodes.

    def _proto(self) -> None:
        protocol = self._byte()
        if protocol not in PROTOCOLS:
            raise Refused(f"it is of protocol {protocol}; 2 to 5 are read")

    def _frame(self) -> None:
        size = self._u8()
        if size > len(self._data) - self.position:
            raise Refused(f"it ends within a frame of {size} bytes")

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _long1(self) -> None:
        size = self._byte()
        if size > MAX_INTEGER_BYTES:
            raise Refused(f"an integer has {size} bytes")
        self._push(int.from_bytes(self._take(size), "little", signed=True))

    def _tuple(self) -> None:
        self._push(tuple(self._since_mark()))

    def _tuple_of(self, size: int) -> None:
        values = [self._pop() for _ in range(size)]
        self._push(tuple(reversed(values)))

    def _append(self) -> None:
        value = self._pop()
        self._list().append(value)

    def _appends(self) -> None:
        values = self._since_mark()
        self._list().extend(values)

    def _list(self) -> list[Value]:
        target = self._top()
        if not isinstance(target, list):
            raise Refused("it appends to what is no list")
        return target

    def _setitem(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Value]) -> None:
        target = self._top()
        if not isinstance(target, dict):
            raise Refused("it sets an item of what is no dictionary")
        if len(items) % 2:
            raise Refused("a dictionary has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise Refused("a dictionary has a key that is no text")
            target[key] = value

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._top()

    def _put(self, index: int) -> None:
        self._memo[index] = self._top()

    def _get(self, index: int) -> None:
        value = self._memo.get(index, _NOTHING)
        if value is _NOTHING:
            raise Refused(f"it names the memo {index}, which is not set")
        self._push(value)

    def _global(self) -> None:
        module = self._line()
        self._push(self._find(module, self._line()))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Refused("the name of a global is no text")
        self._push(self._find(module, name))

    def _find(self, module: str, name: str) -> Value:
        found = self._allowed.get((module, name))
        if found is None:
            raise Refused(f"it names {f'{module[:80]}.{name[:80]}'!r}, which is not allowed")
        return found

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Function) or not isinstance(arguments, tuple):
            raise Refused("it calls what is not allowed to be called")
        self._push(function.call(arguments))

    def _newobj(self) -> None:
        arguments, record_class = self._pop(), self._pop()
        bare = isinstance(arguments, tuple) and not arguments
        if not isinstance(record_class, RecordClass) or not bare:
            raise Refused("it makes an object of a class that is not allowed, or with arguments")
        self._push(Record(record_class))

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if not isinstance(target, Record | Buildable):
            raise Refused("it gives a state to what takes none")
        target.build(state)

    def _binpersid(self) -> None:
        if self._persistent is None:
            raise Refused("a persistent id is not allowed")
        self._push(self._persistent(self._pop()))


def _decoded(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise Refused("a text is not UTF-8") from None


_STOP = ord(".")
_HANDLERS: Final[Mapping[int, Callable[[PickleReader], None]]] = {
    0x80: PickleReader._proto,
    0x95: PickleReader._frame,
    ord("("): PickleReader._mark,
    ord("N"): lambda reader: reader._push(None),
    0x88: lambda reader: reader._push(True),
    0x89: lambda reader: reader._push(False),
    ord("J"): lambda reader: reader._push(_I4.unpack(reader._take(4))[0]),
    ord("K"): lambda reader: reader._push(reader._byte()),
    ord("M"): lambda reader: reader._push(reader._u2()),
    0x8A: PickleReader._long1,
    ord("G"): lambda reader: reader._push(_F8.unpack(reader._take(8))[0]),
    0x8C: lambda reader: reader._text(reader._byte()),
    ord("X"): lambda reader: reader._text(reader._u4()),
    0x8D: lambda reader: reader._text(reader._u8()),
    ord("C"): lambda reader: reader._push(reader._take(reader._byte())),
    ord("B"): lambda reader: reader._push(reader._take(reader._u4())),
    0x8E: lambda reader: reader._push(reader._take(reader._u8())),
    0x96: lambda reader: reader._push(reader._take(reader._u8())),
    ord(")"): lambda reader: reader._push(()),
    ord("]"): lambda reader: reader._push([]),
    ord("}"): lambda reader: reader._push({}),
    ord("t"): PickleReader._tuple,
    0x85: lambda reader: reader._tuple_of(1),
    0x86: lambda reader: reader._tuple_of(2),
    0x87: lambda reader: reader._tuple_of(3),
    ord("a"): PickleReader._append,
    ord("e"): PickleReader._appends,
    ord("s"): PickleReader._setitem,
    ord("u"): PickleReader._setitems,
    0x94: PickleReader._memoize,
    ord("q"): lambda reader: reader._put(reader._byte()),
    ord("r"): lambda reader: reader._put(reader._u4()),
    ord("h"): lambda reader: reader._get(reader._byte()),
    ord("j"): lambda reader: reader._get(reader._u4()),
    ord("c"): PickleReader._global,
    0x93: PickleReader._stack_global,
    ord("R"): PickleReader._reduce,
    0x81: PickleReader._newobj,
    ord("b"): PickleReader._build,
    ord("Q"): PickleReader._binpersid,
}
