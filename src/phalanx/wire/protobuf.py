"""Protobuf without generated code: messages from a descriptor set in a pool of their own, and a
look at a message's top fields without decoding it.

A pool of their own, because another package's messages of the same names may be in the process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple, TypeVar

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message

from phalanx.errors import MalformedRequestError

M = TypeVar("M", bound=Message)

DESCRIPTORS = "descriptors.binpb"
MAX_FIELDS = 10_000
"""Fields of one message, those of its own messages included: far more than any honest one has."""
MAX_SHORT_BYTES = 128
"""A packed list of numbers that is meant to be short, such as a shape."""

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT_BYTES = 10


def message_classes(package: str) -> Mapping[str, type[Message]]:
    """The classes, by full name, of the descriptor set that lies in `package`'s folder."""
    pool = DescriptorPool()
    packed = files(package).joinpath(DESCRIPTORS).read_bytes()
    names = []
    for file in descriptor_pb2.FileDescriptorSet.FromString(packed).file:
        pool.AddSerializedFile(file.SerializeToString())
        names += [f"{file.package}.{message.name}" for message in file.message_type]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names
    }


class Field(NamedTuple):
    """One field as it lies in the message: its value is `data[start:end]`."""

    number: int
    wire_type: int
    start: int
    end: int


def fields(data: bytes, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of the message in `data[start:end]`, in order, without copying any.

    Raises `MalformedRequestError` where the bytes are not a message.
    """
    end = len(data) if end is None else end
    while start < end:
        key, start = _varint(data, start, end)
        wire_type = key & 7
        if wire_type == BYTES:
            num_bytes, start = _varint(data, start, end)
            stop = start + num_bytes
        elif wire_type == VARINT:
            _, stop = _varint(data, start, end)
        elif wire_type in _FIXED:
            stop = start + _FIXED[wire_type]
        else:
            raise MalformedRequestError(f"the message has a field of wire type {wire_type}")
        if stop > end:
            raise MalformedRequestError("the message ends within a field")
        yield Field(key >> 3, wire_type, start, stop)
        start = stop


def _varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    value = 0
    for index in range(start, min(end, start + _MAX_VARINT_BYTES)):
        byte = data[index]
        value |= (byte & 0x7F) << (7 * (index - start))
        if byte < 0x80:
            return value, index + 1
    raise MalformedRequestError("the message ends within a number, or the number is too long")


def head_fields(data: bytes, numbers: Collection[int]) -> dict[int, Field]:
    """The top-level fields of these numbers, as far as the message has them.

    Of a field that comes twice the last counts, as protobuf wants it.
    """
    found = {}
    for count, field in enumerate(fields(data)):
        if count >= MAX_FIELDS:
            raise MalformedRequestError(f"the message has more than {MAX_FIELDS} fields")
        if field.number in numbers:
            found[field.number] = field
    return found


def text_of(data: bytes, field: Field | None) -> str:
    """The value of a text field; "" where the message does not have it."""
    if field is None or field.wire_type != BYTES:
        return ""
    try:
        return data[field.start : field.end].decode()
    except UnicodeDecodeError as error:
        raise MalformedRequestError(f"the message has a text that is not UTF-8: {error}") from error


def number_of(data: bytes, field: Field | None) -> int:
    """The value of an unsigned number; 0 where the message does not have it."""
    if field is None or field.wire_type != VARINT:
        return 0
    return _varint(data, field.start, field.end)[0]


@dataclass(frozen=True)
class Form:
    """What to look into before a message is decoded: its messages, and its short packed lists.

    A decoded field takes more memory than its bytes: a few bytes for an empty message become an
    object, one byte of a packed number eight. So both are counted first.
    """

    messages: Mapping[int, Form]
    short: frozenset[int] = frozenset()


def parse(cls: type[M], data: bytes, form: Form) -> M:
    """The decoded message. Raises `MalformedRequestError`, without decoding what is out of bounds."""
    _count(data, 0, len(data), form, 0)
    try:
        return cls.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        name = cls.DESCRIPTOR.name
        raise MalformedRequestError(f"the message is not of type {name}: {error}") from error


def _count(data: bytes, start: int, end: int, form: Form, seen: int) -> int:
    for field in fields(data, start, end):
        seen += 1
        if seen > MAX_FIELDS:
            raise MalformedRequestError(f"the message has more than {MAX_FIELDS} fields")
        if field.wire_type != BYTES:
            continue
        if field.number in form.short and field.end - field.start > MAX_SHORT_BYTES:
            raise MalformedRequestError(
                f"the message has a shape of {field.end - field.start} bytes"
            )
        if field.number in form.messages:
            seen = _count(data, field.start, field.end, form.messages[field.number], seen)
    return seen
