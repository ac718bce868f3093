"""Torch tensors out of the bytes that a trainer sent."""

from __future__ import annotations

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.wire.sglang.named_tensors import (
    FIELD,
    SAFETENSORS,
    check_tensor_format,
    decoded_part,
    unpickled,
)
from phalanx.wire.sglang.weights import TensorBody


def sent_tensors(body: TensorBody, num_ranks: int) -> dict[str, torch.Tensor]:
    """The tensors by name; takes as long as their bytes are many.

    Raises `InvalidRequestError` for what is not read, or holds none.
    """
    check_tensor_format(body.load_format)
    data = decoded_part(body.serialized_named_tensors, num_ranks)
    tensors = _of_file(data) if body.load_format == SAFETENSORS else _of_pickle(data)
    if not tensors:
        raise InvalidRequestError(f"{FIELD} has no tensors in it", field=FIELD)
    return tensors


def _of_file(data: bytes) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise MalformedRequestError(
            f"{FIELD} is no safetensors file: {error}", field=FIELD
        ) from error


def _of_pickle(data: bytes) -> dict[str, torch.Tensor]:
    # The arrays are views of what was sent, which torch would not keep from being written to.
    return {name: torch.from_numpy(np.array(one)) for name, one in unpickled(data).items()}
