"""The same calls over CUDA devices, where a machine has two."""

from __future__ import annotations

import pytest
import torch

from phalanx import parallel as P
from phalanx.schema.parallel import ParallelConfig
from tests.parallel.rank_pool import TIMEOUT_S, RankPool

DEVICES = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
needs_two = pytest.mark.skipif(DEVICES < 2, reason=f"needs 2 CUDA devices; there are {DEVICES}")


def _collectives() -> None:
    facts = P.default_group()
    device = torch.device("cuda", facts.rank)
    torch.accelerator.set_device_index(facts.rank)
    P.init(ParallelConfig(), device=device, timeout_s=TIMEOUT_S)
    P.warmup_collectives()
    size, rank = facts.size, facts.rank
    every = [torch.arange(6.0, device=device).view(2, 3) * (r + 1) for r in range(size)]
    x = every[rank]
    assert torch.equal(P.all_reduce(x, group="dense_tp"), every[0] + every[1])
    assert torch.equal(P.all_reduce(x.bfloat16(), "dense_tp").float(), every[0] + every[1])
    assert torch.equal(P.all_gather(x, group="dense_tp"), torch.cat(every, -1))
    uneven = P.all_gather(x[: rank + 1], "dense_tp", 0, sizes=(1, 2))
    assert torch.equal(uneven, torch.cat([every[0][:1], every[1][:2]]))
    assert torch.equal(P.reduce_scatter(x, "dense_tp"), (every[0] + every[1])[rank : rank + 1])
    assert torch.equal(P.all_to_all(x, "dense_tp"), torch.stack([e[rank] for e in every]))
    assert torch.equal(P.broadcast(x, "dense_tp", src=1), every[1])
    if rank == 0:
        P.send(x, "dense_tp", dst=1)
    else:
        assert torch.equal(P.recv((2, 3), torch.float32, "dense_tp", src=0), every[0])
    P.barrier()


@needs_two
def test_collectives_over_nccl():
    pool = RankPool(2, device_type="cuda")
    pool.run(_collectives)
    pool.close()


def _alone() -> None:
    device = torch.device("cuda", 0)
    P.init(ParallelConfig(), device=device)
    x = torch.arange(4.0, device=device)
    assert torch.equal(P.all_reduce(x, group="dense_tp"), x)
    assert P.recv((2,), torch.float32, "dense_tp", src=0).device == device


@pytest.mark.skipif(DEVICES < 1, reason=f"needs a CUDA device; there are {DEVICES}")
def test_a_single_cuda_rank_joins_a_group_and_copies():
    pool = RankPool(1, device_type="cuda")
    pool.run(_alone)
    pool.close()
