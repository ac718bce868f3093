"""What `/update_weights_from_tensor` brings, without torch and without Python's unpickler.

SGLang's own clients send handles of memory (CUDA IPC, or shared memory of their process), which
only their process can give out; those are refused in words. What brings its numbers with it is
read: a safetensors file (`load_format: "safetensors"`), or a plain pickle of names and CPU tensors.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable

import numpy as np

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.wire.lerobot.arrays import Array
from phalanx.wire.lerobot.pickle_reader import Budget, PickleReader
from phalanx.wire.lerobot.tensors import torch_globals

FIELD = "serialized_named_tensors"
SAFETENSORS = "safetensors"
MAX_OPCODES = 500_000
"""Some thousand tensors."""
MAX_GROWTH = 4
"""How much larger tensors may be than what brought them: bfloat16 doubles, and so do tied weights."""
_HANDLES = ("torch.multiprocessing", "multiprocessing.", "sglang.", "torch.cuda")
_HINT = (
    'send a safetensors file as base64 with load_format="safetensors", or use '
    "/update_weights_from_disk or /update_weights_from_distributed"
)


def check_tensor_format(load_format: str | None) -> None:
    """Refuse a format that is not read."""
    if load_format not in (None, "auto", "direct", SAFETENSORS):
        raise InvalidRequestError(
            f"load_format={load_format!r} is not read here; {_HINT}", field="load_format"
        )


def decoded_part(parts: list[str], num_ranks: int) -> bytes:
    """The bytes of all tensors. Each rank's part holds all of them, so the first one is taken."""
    if len(parts) not in (1, num_ranks):
        raise InvalidRequestError(
            f"{FIELD} has {len(parts)} entries; give one, or one for each of {num_ranks} ranks",
            field=FIELD,
        )
    try:
        return base64.b64decode(parts[0], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedRequestError(f"{FIELD} is not base64: {error}", field=FIELD) from None


def unpickled(data: bytes) -> dict[str, Array]:
    """The arrays by name in a plain pickle of `[(name, tensor), ...]` or `{name: tensor}`.

    bfloat16 comes as float32, which holds it exactly.
    """
    budget = Budget(len(data), MAX_OPCODES)
    reader = PickleReader(memoryview(data), torch_globals(budget), budget)
    try:
        value = reader.read()
    except MalformedRequestError as error:
        by_handle = any(f"'{name}" in str(error) for name in _HANDLES)
        why = "its tensors are handles of another process's memory: " if by_handle else ""
        raise MalformedRequestError(f"{FIELD}: {why}{error}; {_HINT}", field=FIELD) from None
    pairs = value.items() if isinstance(value, dict) else value
    if not isinstance(pairs, Iterable):
        raise _not_named()
    arrays: dict[str, Array] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _not_named()
        name, array = pair
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise _not_named()
        if name in arrays:
            raise InvalidRequestError(f"{FIELD} has {name!r} twice", field=FIELD)
        arrays[name] = array
    # Any number of tensors may be views of the same bytes.
    num_bytes = sum(array.nbytes for array in arrays.values())
    if num_bytes > MAX_GROWTH * len(data):
        raise InvalidRequestError(
            f"{FIELD}: {len(arrays)} tensors of {num_bytes} bytes in all share the {len(data)} bytes "
            "that were sent; send each with numbers of its own",
            field=FIELD,
        )
    return arrays


def _not_named() -> MalformedRequestError:
    return MalformedRequestError(
        f"{FIELD} holds no list of (name, tensor) pairs; {_HINT}", field=FIELD
    )
