"""Tensors travel by value, those in shared memory by handle; all that torch has arrives."""

from __future__ import annotations

import dataclasses
import tempfile

import pytest
import torch

from phalanx.engine.workers.payload import decode, encode
from phalanx.engine.workers.tensors import MAX_SHARED

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


def through_bytes(obj):
    encoded = encode(obj)
    body = bytearray(b"".join(encoded.chunks))
    decoded = decode(
        memoryview(body),
        encoded.sizes,
        by_handle=encoded.by_handle,
        descriptors=[file.fileno() for file in encoded.descriptors],
    )
    body[:] = b"\xff" * len(body)
    return decoded


def same(left, right):
    assert left.dtype == right.dtype and left.shape == right.shape
    assert left.resolve_conj().resolve_neg().tolist() == right.tolist()


@pytest.mark.parametrize("length", [3, 20_000], ids=["small", "large"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_arrive(dtype, length):
    tensor = (torch.arange(length) % 100).to(dtype)
    arrived = through_bytes(tensor)
    same(tensor, arrived)
    arrived.fill_(1)
    same(tensor, (torch.arange(length) % 100).to(dtype))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, ::2],
        lambda t: t.mT,
        lambda t: t[2:, 1],
        lambda t: t[0, 0, 0],
        lambda t: t[:0],
        lambda t: t[:, :0],
        lambda t: t[:1].expand(4, -1, -1),
        lambda t: t.to(memory_format=torch.contiguous_format).flip(0),
        lambda t: torch.view_as_complex(t[..., :2].contiguous()).conj(),
        lambda t: torch.view_as_complex(t[..., :2].contiguous()).conj().imag,
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_views_arrive_whatever_their_strides(view, shared):
    base = torch.arange(4 * 30 * 8, dtype=torch.float32).reshape(4, 30, 8)
    tensor = view(base.share_memory_() if shared else base)
    same(tensor, through_bytes(tensor))


def test_only_the_elements_of_a_view_travel():
    view = torch.zeros(1000, 1000)[:10, :10]
    assert encode(view).num_bytes < 1000


def test_an_arrived_tensor_needs_no_gradient():
    leaf = torch.ones(3, requires_grad=True)
    for tensor in (leaf, leaf * 2):
        arrived = through_bytes(tensor)
        assert not arrived.requires_grad
        same(tensor.detach(), arrived)


def test_tensors_of_other_kinds_arrive_by_their_own_pickling():
    parameter = through_bytes(torch.nn.Parameter(torch.ones(5000)))
    assert type(parameter) is torch.nn.Parameter and parameter.requires_grad
    sparse = torch.eye(3).to_sparse()
    same(sparse.to_dense(), through_bytes(sparse).to_dense())
    with torch.inference_mode():
        inferred = torch.ones(3) * 2
    same(inferred, through_bytes(inferred))
    assert through_bytes(torch.empty(3, device="meta")).is_meta


@dataclasses.dataclass
class Batch:
    pixels: torch.Tensor
    mask: torch.Tensor
    names: list[str]


def test_a_dataclass_with_several_tensors_arrives_and_keeps_one_tensor_one():
    pixels = torch.rand(3, 64, 64, dtype=torch.float32)
    arrived = through_bytes([Batch(pixels, pixels > 0.5, ["a"]), pixels])
    same(pixels, arrived[0].pixels)
    same(pixels > 0.5, arrived[0].mask)
    assert arrived[1] is arrived[0].pixels


def test_a_tensor_in_shared_memory_arrives_as_the_same_memory():
    tensor = torch.zeros(20, 50_000).share_memory_()
    encoded = encode([tensor, tensor[3:, ::2]])
    assert encoded.num_bytes < 2000 and len(encoded.descriptors) == 1
    whole, part = through_bytes([tensor, tensor[3:, ::2]])
    tensor[3, 0] = 7
    assert whole[3, 0] == part[0, 0] == 7
    part[0, 1] = 9
    assert tensor[3, 2] == 9
    assert part.stride() == (50_000, 2)


def test_shared_memory_outlives_its_sender():
    arrived = through_bytes(torch.full((1000,), 3.0).share_memory_())
    assert arrived.sum() == 3000


def test_an_empty_tensor_in_shared_memory_arrives():
    same(torch.empty(0, 3), through_bytes(torch.empty(0, 3).share_memory_()))


def test_more_shared_tensors_than_a_packet_can_carry_are_copied():
    tensors = [torch.full((4,), float(i)).share_memory_() for i in range(MAX_SHARED + 3)]
    assert len(encode(tensors).descriptors) == MAX_SHARED
    for sent, arrived in zip(tensors, through_bytes(tensors), strict=True):
        same(sent, arrived)


def test_what_has_a_name_instead_of_a_descriptor_is_copied():
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(range(100)))
        file.flush()
        mapped = torch.from_file(file.name, shared=True, size=100, dtype=torch.uint8)
        assert mapped.is_shared()
        assert not encode(mapped).by_handle
        same(mapped, through_bytes(mapped))
    shared = torch.ones(3).share_memory_()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        assert not encode(shared).by_handle
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
