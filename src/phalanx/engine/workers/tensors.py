"""How torch tensors travel: values are copied beside the pickle; a tensor that already lies in
shared memory or on a device travels as a handle, and its receiver sees the same memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy, reductions

from phalanx.engine.workers.payload import Handles, SharedFile

# A packet takes 253 descriptors. Further tensors in shared memory are copied like any other.
MAX_SHARED = 200

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def reduce(tensor: torch.Tensor, handles: Handles) -> Any:
    """What pickle needs to rebuild a tensor. It arrives without gradients.

    A tensor of another layout than strided is left to torch's own pickling.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return NotImplemented
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_cuda:
        return _reduce_on_device(tensor, handles)
    if tensor.device.type != "cpu":
        return NotImplemented
    if (
        tensor.is_shared()  # type: ignore[no-untyped-call]
        and len(handles.descriptors) < MAX_SHARED
        and get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    ):
        reduced = _reduce_shared(tensor, handles)
        if reduced is not None:
            return reduced
    plain = tensor.contiguous()
    buffer = pickle.PickleBuffer(plain.reshape(-1).view(torch.uint8).numpy().data)
    return rebuild, (buffer, tensor.dtype, tuple(tensor.shape))


def rebuild(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over a buffer that belongs to it alone."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


def _reduce_shared(tensor: torch.Tensor, handles: Handles) -> Reduced | None:
    storage = tensor.untyped_storage()
    descriptor, num_bytes = storage._share_fd_cpu_()
    if descriptor < 0:  # a mapped file of the user's, which was not kept open
        return None
    index = handles.add(SharedFile(descriptor, storage))
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return rebuild_shared, (index, num_bytes, tensor.dtype, *place)


def rebuild_shared(
    descriptors: Sequence[int],
    index: int,
    num_bytes: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """A tensor over the sender's memory, which lives as long as either of them."""
    new_shared = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]
    storage = new_shared(descriptors[index], num_bytes)
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def _reduce_on_device(tensor: torch.Tensor, handles: Handles) -> Reduced:
    # Each receiver gives its own handle back, so that each needs one.
    handles.used = True
    each: tuple[Reduced, ...] = tuple(
        reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        for _ in range(handles.num_readers)
    )
    return rebuild_on_device, (each,)


def rebuild_on_device(reader: int, each: tuple[Reduced, ...]) -> torch.Tensor:
    """A view of the sender's device memory, valid while the sender keeps its tensor."""
    function, arguments = each[reader]
    tensor: torch.Tensor = function(*arguments)
    return tensor
