"""What becomes of requests and of their replica when one of its ranks dies, or goes its own way."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch

from phalanx import DeploymentConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.engine_config import DeviceConfig
from phalanx.errors import EngineUnavailableError, InvalidRequestError, PhalanxError
from phalanx.server import WorkerSupervisorConfig
from tests.engine.ports import free_base_port
from tests.models.cosmos3.deadly import (
    DECODE,
    DENOISE,
    ENCODE,
    LOADING,
    READ,
    DeadlyArgs,
    DeadlyPolicy,
)
from tests.models.cosmos3.in_each_rank import topology
from tests.models.cosmos3.standing_in import loaded
from tests.models.cosmos3.stored import checkpoint
from tests.models.cosmos3.test_entries import policy_request

Engine.register(DeadlyPolicy)
CFG, TP = (1, 2), (2, 1)
PHASES = {"encode": ENCODE, "read": READ, "denoise": DENOISE, "decode": DECODE}
REASON = re.compile("SIGKILL|leader of this replica is gone|closed by peer|reset by peer")
"""The death itself, or what the other rank has seen of it, whichever is known first."""
WEIGHTS = Path("transformer") / "diffusion_pytorch_model.safetensors"


def engine(folder: Path, ranks: tuple[int, int], **deed: object) -> Engine:
    args = DeadlyArgs(str(folder), max_tokens=64, native_operators="off", decode_video=True, **deed)
    config = EngineConfig(
        DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1), topology(*ranks)
    )
    process = WorkerSupervisorConfig(base_port=free_base_port())
    deployment = DeploymentConfig.local(replica_count=1, process_config=process)
    return Engine(EngineArgs(DeadlyPolicy.name, args, config), deployment=deployment)


def asked():
    """From pixels to pixels."""
    return policy_request(
        cond_video_latents=None, cond_video_pixels=torch.zeros(1, 3, 1, 48, 64), noise=None
    )


@contextmanager
def nothing_left():
    """No process of an engine outlives it."""
    before = children()
    yield
    assert children() == before


def children() -> set[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return set(listed.read().split())


def all_end(served: Engine, count: int = 3) -> list[BaseException]:
    """Every request that was taken ends, once, with an error; no further one is taken."""
    ends: list[object] = []
    pending = [served.submit(asked()) for _ in range(count)]
    for one in pending:
        one.add_done_callback(ends.append)
    errors = [one.exception() for one in pending]
    assert None not in errors
    assert len(ends) == count
    with pytest.raises(EngineUnavailableError):
        served.step(asked())
    assert served.statistics().num_in_flight == 0
    return errors


def killed(folder: Path, ranks: tuple[int, int], rank: int, phase: str) -> None:
    with nothing_left(), engine(folder, ranks, rank=rank, dies_at=PHASES[phase]) as served:
        for error in all_end(served):
            assert REASON.search(str(error))


def test_a_rank_that_is_killed_in_a_step_ends_all_requests_of_its_replica(folders):
    killed(folders["silu"], CFG, 1, "denoise")


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_may_die_in_every_phase(folders, phase, rank):
    killed(folders["silu"], CFG, rank, phase)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["read", "denoise"])
def test_a_rank_of_a_layer_may_die(folders, phase):
    killed(folders["silu"], TP, 1, phase)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_while_it_loads_fails_the_start(folders, rank):
    seen = "(SIGKILL|closed its connection) .*while loading"
    with nothing_left(), pytest.raises(EngineUnavailableError, match=seen):
        engine(folders["silu"], CFG, rank=rank, dies_at=LOADING)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [CFG, TP], ids=["cfg", "tp"])
def test_a_rank_that_draws_other_noise_ends_the_replica_in_words(folders, ranks):
    with nothing_left(), engine(folders["silu"], ranks, other_seed=True) as served:
        for error in all_end(served, 1):
            assert "begins with other latents on rank 1 than on rank 0" in str(error)


def with_other_weights(folder: Path) -> Path:
    other = checkpoint(folder)
    weights = safetensors.torch.load_file(other / WEIGHTS)
    weights["norm_moe_gen.weight"][3] += 1e-3
    safetensors.torch.save_file(weights, other / WEIGHTS)
    return other


def test_weights_are_told_apart_by_their_checksum(folders, tmp_path):
    one, again, other = map(
        loaded, (folders["silu"], folders["silu"], with_other_weights(tmp_path))
    )
    assert one.checksum() == again.checksum() != other.checksum()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [CFG, TP], ids=["cfg", "tp"])
def test_a_rank_with_other_weights_is_refused_before_any_request(folders, tmp_path, ranks):
    other = with_other_weights(tmp_path)
    with nothing_left(), pytest.raises(PhalanxError, match="the checksum of its weights.* differs"):
        engine(folders["silu"], ranks, other_checkpoint=str(other))


@pytest.mark.long
def test_a_missing_tensor_is_named_and_a_wrong_geometry_harms_nobody_else(folders, tmp_path):
    broken = checkpoint(tmp_path)
    weights = safetensors.torch.load_file(broken / WEIGHTS)
    del weights["layers.1.self_attn.add_q_proj.weight"]
    safetensors.torch.save_file(weights, broken / WEIGHTS)
    with (
        nothing_left(),
        pytest.raises(PhalanxError, match=r"layers\.1\.self_attn\.add_q_proj\.weight"),
    ):
        engine(broken, CFG)
    with nothing_left(), engine(folders["silu"], CFG) as served:
        first = served.submit(asked())
        for wrong in ({"video_shape": (3, 3, 40)}, {"action_chunk": 5}):
            with pytest.raises(InvalidRequestError):
                served.step(policy_request(**wrong))
        assert first.result().action.shape == (1, 8, 10)
        assert served.step(asked()).pixels is not None
