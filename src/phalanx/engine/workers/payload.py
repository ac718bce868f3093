"""Turns one object into bytes and back: a pickle, and the large buffers that stand beside it.

Both ends are processes of one engine, over a socket and memory that nobody else has; a client's
bytes are decoded by their protocol long before they come here. Buffers are not copied here: whoever
encodes copies them out before the object's owner goes on. Decoded arrays lie in fresh memory of
their own, or in memory that was lent to them. Imports no torch where no tensor travels.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.errors import InvalidRequestError

Bytes = npt.NDArray[np.uint8]

# A smaller buffer costs less inside the pickle than as one of its own.
MIN_BUFFER_BYTES = 8192

ALIGNMENT = 64
"""Where buffers begin among the bytes of a payload: at multiples of this."""

# How far an error message looks into a request that cannot be pickled.
_MAX_DEPTH = 8

_TENSORS = "phalanx.engine.workers.tensors"


class EncodedPayload:
    """An object as `chunks` of bytes, still in the memory of the object itself.

    `sizes` are the bytes of the pickle, then of each buffer; the chunks hold them one after
    another, aligned (a pickle may be several chunks). `descriptors` are the files that tensors in shared
    memory lie in. `by_handle`: some tensor travels as a handle, so that `decode` needs to know who
    decodes.
    """

    __slots__ = ("by_handle", "chunks", "descriptors", "num_bytes", "sizes")

    def __init__(self, pickled: list[bytes], buffers: list[memoryview], handles: Handles) -> None:
        self.chunks: list[bytes | memoryview] = [*pickled]
        self.sizes = (sum(map(len, pickled)), *[buffer.nbytes for buffer in buffers])
        end = self.sizes[0]
        for buffer, (start, next_end) in zip(buffers, buffer_spans(self.sizes), strict=True):
            if start > end:
                self.chunks.append(bytes(start - end))
            self.chunks.append(buffer)
            end = next_end
        self.num_bytes = end
        self.descriptors = handles.descriptors
        self.by_handle = handles.used


def buffer_spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each buffer of a payload of those sizes begins and ends among its bytes."""
    spans, end = [], sizes[0]
    for size in sizes[1:]:
        start = end + -end % ALIGNMENT
        end = start + size
        spans.append((start, end))
    return spans


class SharedFile(NamedTuple):
    """A file in shared memory that `owner` keeps open."""

    descriptor: int
    owner: Any

    def fileno(self) -> int:
        return self.descriptor


class Handles:
    """Collects what travels beside a payload because it is not copied.

    `num_readers`: how many processes decode the payload.
    """

    __slots__ = ("descriptors", "num_readers", "used")

    def __init__(self, num_readers: int) -> None:
        self.num_readers = num_readers
        self.descriptors: list[SharedFile] = []
        self.used = False

    def add(self, file: SharedFile) -> int:
        """The number by which its receiver finds the file."""
        self.used = True
        for index, other in enumerate(self.descriptors):
            if other.descriptor == file.descriptor:
                return index
        self.descriptors.append(file)
        return len(self.descriptors) - 1


class _Chunks(list[bytes]):
    """A file for the pickler, which hands over its large byte strings without copying them."""

    write = list.append


class _Pickler(pickle.Pickler):
    """Puts arrays and tensors out of band, whatever their strides are."""

    handles: Handles

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray:
            return _reduce_array(obj)
        # By its name, so that torch is not imported: other classes of tensors reduce to this one.
        if kind.__name__ == "Tensor" and kind.__module__ == "torch":
            from phalanx.engine.workers import tensors

            return tensors.reduce(obj, self.handles)
        return NotImplemented


def _reduce_array(array: npt.NDArray[Any]) -> Any:
    """As numpy does it, where that keeps the data in one piece; in a shorter form for numbers."""
    dtype = array.dtype
    if not array.flags.forc:
        if dtype.hasobject:
            return NotImplemented
        array = np.ascontiguousarray(array)
    if dtype.isbuiltin == 1 and dtype.kind in "biufc" and array.flags.c_contiguous:
        return np.ndarray, (array.shape, dtype.str, pickle.PickleBuffer(array))  # type: ignore[arg-type]
    return array.__reduce_ex__(5)


class _Unpickler(pickle.Unpickler):
    """Gives the functions that rebuild tensors from handles what came beside the pickle."""

    def __init__(self, pickled: memoryview, buffers: list[Bytes], context: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self._context = context

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == _TENSORS and name in self._context:
            return functools.partial(found, self._context[name])
        return found


def encode(obj: Any, num_readers: int = 1) -> EncodedPayload:
    """Pickle an object that `num_readers` processes will decode; raises what pickling raises."""
    pickled = _Chunks()
    buffers: list[memoryview] = []
    handles = Handles(num_readers)

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < MIN_BUFFER_BYTES:
            return True
        buffers.append(view)
        return False

    pickler = _Pickler(pickled, 5, buffer_callback=keep_in_band)
    pickler.handles = handles
    pickler.dump(obj)
    return EncodedPayload(pickled, buffers, handles)


def encode_request(request: Any, num_readers: int) -> EncodedPayload:
    """Encode a request; one that cannot be pickled is refused, naming the part at fault."""
    try:
        return encode(request, num_readers)
    except Exception as error:
        path, culprit = find_culprit(request)
        raise InvalidRequestError(
            f"{'.'.join(('request', *path))} of type {type(culprit).__qualname__} cannot be sent "
            f"to a worker process: {error}; a request must be picklable (no lambdas, locks, open "
            "files or classes defined inside a function)",
            field=".".join(path),
        ) from error


def decode(
    body: memoryview,
    sizes: Sequence[int],
    *,
    lent: Bytes | None = None,
    by_handle: bool = False,
    descriptors: Sequence[int] = (),
    reader: int = 0,
) -> Any:
    """The object whose pickle and buffers `body` holds; nothing of it stays in `body`'s memory.

    But where `lent` is an array over the same bytes, the object's arrays lie there. `reader` numbers this process among those that decode the payload. `descriptors` remain the
    caller's. Raises what unpickling raises.
    """
    pickled = body[: sizes[0]]
    if lent is None:
        spans = buffer_spans(sizes)
        buffers = [np.frombuffer(body[start:end], np.uint8).copy() for start, end in spans]
    else:
        buffers = [lent[start:end] for start, end in buffer_spans(sizes)]
    if not by_handle:
        return pickle.loads(pickled, buffers=buffers)
    context = {"rebuild_shared": descriptors, "rebuild_on_device": reader}
    return _Unpickler(pickled, buffers, context).load()


def find_culprit(obj: Any, path: tuple[str, ...] = ()) -> tuple[tuple[str, ...], Any]:
    """The innermost part that cannot be pickled by itself, and the way to it."""
    for name, part in _parts(obj) if len(path) < _MAX_DEPTH else ():
        try:
            encode(part, num_readers=0)
        except Exception:  # noqa: BLE001 - any reason makes it the culprit
            return find_culprit(part, (*path, name))
    return path, obj


def _parts(obj: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(obj, dict):
        return [(str(key), value) for key, value in obj.items()]
    if isinstance(obj, list | tuple):
        return [(str(index), part) for index, part in enumerate(obj)]
    if isinstance(obj, msgspec.Struct):
        return [(name, getattr(obj, name)) for name in obj.__struct_fields__]
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [(field.name, getattr(obj, field.name)) for field in dataclasses.fields(obj)]
    return ()
