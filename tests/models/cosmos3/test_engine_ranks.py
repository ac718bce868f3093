"""Replicas of Cosmos3 that span ranks, through the whole engine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx import DeploymentConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.engine_config import DeviceConfig
from phalanx.errors import EngineAsleepError, EngineUnavailableError, PhalanxError
from phalanx.models.cosmos3.args import Cosmos3Args, Cosmos3PolicyArgs
from phalanx.models.cosmos3.entry import Cosmos3, Cosmos3Policy
from phalanx.models.cosmos3.request import DenoiseProgress
from phalanx.schema.control import Continue, Flush, Pause, PauseMode, Sleep, Wake
from phalanx.server import WorkerSupervisorConfig
from tests.engine.ports import free_base_port
from tests.models.cosmos3.external_rank import OUTPUT_RANK
from tests.models.cosmos3.failing import FailingPolicy
from tests.models.cosmos3.in_each_rank import topology
from tests.models.cosmos3.loops import TOLERANCE, Loop, largest
from tests.models.cosmos3.requests import action_request, video_request
from tests.models.cosmos3.test_entries import policy_request, video

Engine.register(Cosmos3)
Engine.register(Cosmos3Policy)
Engine.register(FailingPolicy)
POLICY = Loop("loop_policy")
ROOT = Path(__file__).parents[3]


def engine(
    name: str,
    args: Cosmos3Args,
    tp: int,
    cfg: int,
    replica_count: int = 1,
    output_rank: int = 0,
    **runtime: object,
) -> Engine:
    config = EngineConfig(
        DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1, **runtime), topology(tp, cfg)
    )
    deployment = DeploymentConfig.local(
        replica_count=replica_count,
        output_rank=output_rank,
        process_config=WorkerSupervisorConfig(base_port=free_base_port(replica_count)),
    )
    return Engine(EngineArgs(name, args, config), deployment=deployment)


@pytest.mark.long
@pytest.mark.parametrize(("tp", "cfg"), [(2, 1), (1, 2), (2, 2)])
def test_r19_r91_e2_a_replica_of_ranks_answers_as_diffusers_did(folders, tp, cfg):
    args = Cosmos3PolicyArgs(str(folders["silu"]), max_batch_size=4, max_tokens=64)
    with engine("cosmos3_policy", args, tp, cfg) as served:
        *deltas, final = served.stream(policy_request())
        _check(final)
        assert deltas[-1] == DenoiseProgress(4, 4, 625)
        # Of a crowd that is pushed back, paused, and partly cancelled, everybody else is served.
        assert served.control(Pause(PauseMode.IN_PLACE))
        kept = [served.submit(policy_request(num_inference_steps=4)) for _ in range(3)]
        cut = served.submit(policy_request(num_inference_steps=200), rid="cut")
        assert served.control(Pause(PauseMode.RETRACT))
        assert served.cancel("cut")
        assert served.control(Continue())
        for one in kept:
            _check(one.result())
        assert cut.result().action.shape == (1, 8, 10)
        unguided = policy_request(guidance_scale=1.0, neg_text_ids=None, neg_text_mask=None)
        interval = policy_request(guidance_interval=(960, 1001))
        first, second = served.submit(unguided), served.submit(interval)
        assert largest(first.result().action - second.result().action) > 0.01
        assert largest(second.result().action[0] - POLICY.io["out.action"]) == pytest.approx(
            1.46, rel=0.06
        )
        assert served.control(Flush())
        # What is held while memory is given back is computed anew.
        held = served.submit(policy_request())
        assert served.control(Pause(PauseMode.IN_PLACE))
        assert served.control(Sleep()) and served.control(Continue())
        with pytest.raises(EngineAsleepError):
            served.submit(policy_request())
        assert served.control(Wake())
        _check(held.result())


@pytest.mark.long
def test_r91_replicas_of_two_ranks_answer_alike(folders):
    args = Cosmos3Args(str(folders["silu"]), max_batch_size=2, max_tokens=64)
    with engine("cosmos3", args, 1, 2, replica_count=2) as served:
        asked = video(sound_frames=4, sound_dim=5, guidance_scale=6.0)
        answers = [one.result() for one in [served.submit(asked) for _ in range(4)]]
        other = served.step(replace(asked, seed=43))
    for answer in answers[1:]:
        assert torch.equal(answer.video, answers[0].video)
        assert torch.equal(answer.sound, answers[0].sound)
    assert not torch.equal(other.video, answers[0].video)


@pytest.mark.long
@pytest.mark.parametrize("output_rank", [0, 1])
def test_r43_the_output_rank_decodes_what_it_answers(folders, output_rank):
    args = Cosmos3Args(str(folders["silu"]), max_tokens=64)
    with engine("cosmos3", args, 1, 2, output_rank=output_rank) as served:
        answer = served.step(video_request())
    assert answer.video.shape == (1, 3, 9, 48, 64)


@pytest.mark.long
def test_r91_r36_a_launchers_ranks_are_one_replica(folders, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "tests.models.cosmos3.external_rank"]
    done = subprocess.run(
        [*command, str(folders["silu"]), str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / str(rank), weights_only=True) for rank in range(2)]
    assert found[1 - OUTPUT_RANK] is None
    action, pixels = found[OUTPUT_RANK]
    assert largest(action[0] - POLICY.io["out.action"]) < TOLERANCE
    assert pixels.shape == (1, 3, 9, 48, 64)


@pytest.mark.long
def test_a_rank_that_cannot_encode_fails_its_replica(folders):
    """The other one would wait for it in the step that follows."""
    args = Cosmos3PolicyArgs(str(folders["silu"]), max_tokens=64)
    with engine(FailingPolicy.name, args, 2, 1, dist_timeout_s=30.0) as served:
        with pytest.raises(PhalanxError, match="leaves the others waiting for it: no memory"):
            served.step(action_request())
        with pytest.raises(EngineUnavailableError):
            served.step(action_request())


def _check(answer) -> None:
    assert largest(answer.action[0] - POLICY.io["out.action"]) < TOLERANCE
    assert largest(answer.video - POLICY.io["out.video"]) < TOLERANCE
