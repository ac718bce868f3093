"""Collectives between real ranks, each against what plain torch makes of all ranks' tensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from phalanx import parallel as P
from phalanx.errors import PhalanxDistError
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    MoeParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)
from tests.parallel.rank_pool import mesh_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
FOUR = ParallelConfig(
    outer=OuterParallelConfig(cfg_size=2),
    dense=DenseParallelConfig(tp_size=2),
    moe=MoeParallelConfig(ep_size=2),
)


def tensor_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that every rank can make of every other: small whole numbers, so sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def _all_reduce() -> None:
    mesh = mesh_of(ParallelConfig())
    for dtype in DTYPES:
        every = torch.stack([tensor_of(r, 3, 5, dtype=dtype) for r in range(mesh.world_size)])
        x = tensor_of(mesh.rank, 3, 5, dtype=dtype)
        assert torch.equal(P.all_reduce(x, group="world"), every.sum(0).to(dtype))
        assert torch.equal(P.all_reduce(x, "world", P.ReduceOp.MAX), every.amax(0))
        assert torch.equal(P.all_reduce(x, "world", P.ReduceOp.MIN), every.amin(0))
        assert torch.equal(x, tensor_of(mesh.rank, 3, 5, dtype=dtype)), "the input was changed"
        strided = x.t()
        assert torch.equal(P.all_reduce(strided, "world"), every.sum(0).to(dtype).t())


def test_r13_all_reduce(two_ranks):
    two_ranks.run(_all_reduce)


def test_r13_all_reduce_over_four(four_ranks):
    four_ranks.run(_all_reduce)


def _in_place() -> None:
    mesh = mesh_of(ParallelConfig())
    x = tensor_of(mesh.rank, 4)
    assert P.all_reduce_(x, group="dense_tp") is x
    assert torch.equal(x, sum(tensor_of(r, 4) for r in range(mesh.world_size)))
    with pytest.raises(PhalanxDistError, match="needs a contiguous tensor; use all_reduce"):
        P.all_reduce_(torch.zeros(2, 3).t(), group="dense_tp")


def test_all_reduce_in_place(two_ranks):
    two_ranks.run(_in_place)


def _same_bits() -> bytes:
    mesh = mesh_of(ParallelConfig())
    generator = torch.Generator().manual_seed(mesh.rank)
    found = [
        P.all_reduce(torch.randn(size, generator=generator), group="world")
        for size in (1, 7, 577, 20_000)
    ]
    return torch.cat(found).numpy().tobytes()


def test_all_ranks_get_the_same_bits(four_ranks):
    # Ranks in lockstep decide by what they computed, so rounding must not tell them apart.
    assert len(set(four_ranks.run(_same_bits))) == 1


def _by_name() -> dict[str, list[float]]:
    mesh = mesh_of(FOUR)
    x = torch.tensor([float(10**mesh.rank)])
    return {name: P.all_reduce(x, group=name).tolist() for name in mesh.group_names}


def test_r13_groups_are_addressed_by_name(four_ranks):
    sums = four_ranks.run(_by_name)
    assert [found["world"] for found in sums] == [[1111.0]] * 4
    assert [found["cfg"] for found in sums] == [[101.0], [1010.0], [101.0], [1010.0]]
    assert [found["dense_tp"] for found in sums] == [[11.0], [11.0], [1100.0], [1100.0]]
    assert [found["moe_ep"] for found in sums] == [[11.0], [11.0], [1100.0], [1100.0]]
    assert [found["attention_cp"] for found in sums] == [[1.0], [10.0], [100.0], [1000.0]]


def _all_gather() -> None:
    mesh = mesh_of(ParallelConfig())
    for dtype in (*DTYPES, torch.bool):
        every = [tensor_of(r, 2, 3, dtype=dtype) for r in range(mesh.world_size)]
        for dim in (0, 1, -1, -2):
            found = P.all_gather(every[mesh.rank], group="dense_tp", dim=dim)
            assert torch.equal(found, torch.cat(every, dim))
            assert found.dtype == dtype
        assert torch.equal(P.all_gather(every[mesh.rank], "dense_tp"), torch.cat(every, -1))
        found = P.all_gather(every[mesh.rank].t(), "dense_tp", 0)
        assert torch.equal(found, torch.cat([x.t() for x in every], 0))


def test_all_gather(two_ranks):
    two_ranks.run(_all_gather)


def _uneven_gather() -> None:
    mesh = mesh_of(ParallelConfig())
    sizes = (3, 0, 2, 1)
    for dim in (0, 1, 2):
        shapes = [[2, 2, 2] for _ in sizes]
        for shape, size in zip(shapes, sizes, strict=True):
            shape[dim] = size
        every = [tensor_of(r, *shape) for r, shape in enumerate(shapes)]
        found = P.all_gather(every[mesh.rank], "dense_tp", dim, sizes=sizes)
        assert torch.equal(found, torch.cat(every, dim))


def test_all_gather_of_parts_of_unequal_size(four_ranks):
    four_ranks.run(_uneven_gather)


def _reduce_scatter() -> None:
    mesh = mesh_of(ParallelConfig())
    size = mesh.world_size
    for dtype in DTYPES:
        every = torch.stack([tensor_of(r, 3 * size, 2 * size, dtype=dtype) for r in range(size)])
        x = every[mesh.rank].clone()
        for dim in (0, 1, -1):
            whole = every.sum(0).to(dtype)
            found = P.reduce_scatter(x, group="dense_tp", dim=dim)
            assert torch.equal(found, whole.chunk(size, dim)[mesh.rank])
            assert found.is_contiguous()
        found = P.reduce_scatter(x, "dense_tp", op=P.ReduceOp.MAX)
        assert torch.equal(found, every.amax(0).chunk(size)[mesh.rank])
        assert torch.equal(x, every[mesh.rank]), "the input was changed"


def test_reduce_scatter(two_ranks):
    two_ranks.run(_reduce_scatter)


def _all_to_all() -> None:
    mesh = mesh_of(ParallelConfig(moe=MoeParallelConfig(ep_size=P.default_group().size)))
    size, rank = mesh.world_size, mesh.rank
    every = [tensor_of(r, 2 * size, 3) for r in range(size)]
    found = P.all_to_all(every[rank], group="moe_ep")
    assert torch.equal(found, torch.cat([x.chunk(size)[rank] for x in every]))
    # Rank s gives s + r rows to rank r.
    splits = [[s + r for r in range(size)] for s in range(size)]
    every = [tensor_of(s, sum(splits[s]), 2) for s in range(size)]
    received = [splits[s][rank] for s in range(size)]
    found = P.all_to_all(every[rank], "moe_ep", splits[rank], received)
    assert torch.equal(found, torch.cat([every[s].split(splits[s])[rank] for s in range(size)]))


def test_all_to_all(two_ranks):
    two_ranks.run(_all_to_all)


def test_all_to_all_over_four(four_ranks):
    four_ranks.run(_all_to_all)


def _local_ranks() -> None:
    # Of the four ranks, 2 and 3 are positions 0 and 1 of the second dense group.
    mesh = mesh_of(FOUR)
    place = mesh.group_rank("dense_tp")
    first, second = mesh.group_members("dense_tp")
    for src, rank in ((0, first), (1, second)):
        x = tensor_of(mesh.rank, 3)
        assert torch.equal(P.broadcast(x, group="dense_tp", src=src), tensor_of(rank, 3))
        assert torch.equal(x, tensor_of(mesh.rank, 3)), "the input was changed"
    for sender in (0, 1):
        if place == sender:
            P.send(tensor_of(mesh.rank, 2, 3).t(), group="dense_tp", dst=1 - sender)
        else:
            found = P.recv((3, 2), torch.float32, group="dense_tp", src=sender)
            assert torch.equal(found, tensor_of((first, second)[sender], 2, 3).t())


def test_src_and_dst_are_positions_in_the_group(four_ranks):
    four_ranks.run(_local_ranks)


def _barrier(folder: Path) -> None:
    mesh = mesh_of(ParallelConfig())
    for turn in range(20):
        written = folder / str(turn)
        if mesh.rank == 0:
            # Rank 1 is at the barrier, or past it if that does not hold it.
            P.recv((1,), torch.int64, group="world", src=1)
            written.touch()
        else:
            P.send(torch.zeros(1, dtype=torch.int64), group="world", dst=0)
        if turn % 2:
            P.barrier()
        else:
            P.barrier(group="dense_tp")
        assert written.exists()


def test_nobody_leaves_a_barrier_before_all_have_come(two_ranks, tmp_path):
    two_ranks.run(_barrier, tmp_path)


def _sums_in_replica(value: float) -> list[float]:
    mesh = mesh_of(ParallelConfig())
    x = torch.tensor([value])
    return [float(P.all_reduce(x, group=name)) for name in mesh.group_names for _ in range(20)]


def test_r22_r92_sums_stay_inside_a_replica(two_ranks, four_ranks):
    # Two replicas with the same group names and rank numbers, summing at the same time.
    with ThreadPoolExecutor() as threads:
        small = threads.submit(two_ranks.run, _sums_in_replica, 1.0)
        large = threads.submit(four_ranks.run, _sums_in_replica, 100.0)
        assert {total for rank in small.result() for total in rank} == {1.0, 2.0}
        assert {total for rank in large.result() for total in rank} == {100.0, 400.0}


def _cfg_only() -> list[float]:
    mesh = mesh_of(ParallelConfig(outer=OuterParallelConfig(cfg_size=2)))
    return P.all_reduce(torch.tensor([1.0 + mesh.rank]), group="cfg").tolist()


def test_r91_branches_of_guidance_meet_in_their_group(four_ranks):
    assert four_ranks.run(_cfg_only) == [[4.0], [6.0], [4.0], [6.0]]


def test_s16_a_group_of_one_gives_copies():
    with P.use_mesh(P.create_mesh(ParallelConfig(), replica_world_size=1)):
        x = torch.arange(6.0).view(2, 3)
        for found in (
            P.all_reduce(x, group="dense_tp"),
            P.all_gather(x, group="dense_tp"),
            P.all_gather(x, group="dense_tp", dim=0, sizes=[2]),
            P.reduce_scatter(x, group="dense_tp"),
            P.all_to_all(x, group="moe_ep"),
            P.all_to_all(x, group="moe_ep", in_splits=[2], out_splits=[2]),
            P.broadcast(x, group="world"),
        ):
            assert torch.equal(found, x)
            assert found.data_ptr() != x.data_ptr()
        assert P.all_reduce_(x, group="dense_tp") is x
        assert torch.equal(x, torch.arange(6.0).view(2, 3))
        P.send(x, group="dense_tp", dst=0)
        received = P.recv((2, 1), torch.bfloat16, group="dense_tp", src=0)
        assert torch.equal(received, torch.zeros(2, 1, dtype=torch.bfloat16))
        P.barrier()


ATTENTION = ParallelConfig(attention=AttentionParallelConfig(cp_size=2, decode_cp_size=2))


def _warm_up() -> None:
    mesh = mesh_of(ATTENTION)
    P.warmup_collectives()
    P.warmup_collectives(["attention_cp", "moe_dp"])
    assert {group.members for group in mesh.distinct_groups()} == {
        (0, 1, 2, 3),
        mesh.group_members("attention_cp"),
        mesh.group_members("attention_tp"),
    }


def test_every_group_can_be_warmed_up(four_ranks):
    four_ranks.run(_warm_up)
