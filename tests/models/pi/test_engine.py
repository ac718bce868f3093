"""pi0.5 and pi0 behind an engine, as a user has them: inline, and as two replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx import DeploymentConfig, Engine, EngineArgs
from phalanx.engine_config import (
    AttentionParallelConfig,
    DenseParallelConfig,
    DeviceConfig,
    EngineConfig,
    OuterParallelConfig,
    ParallelConfig,
    RuntimeConfig,
    use_engine_config,
)
from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.models.pi0.main_pi0 import PI0Args, PI0Config, PI0Entry
from phalanx.models.pi05.main_pi05 import (
    PI05Args,
    PI05Config,
    PI05Entry,
    PI05Request,
    PI05RolloutRequest,
)
from phalanx.schema.control import LoadWeights
from phalanx.testing import check_batching_entry
from tests.models.pi.stored import FLOAT32, HEADS, checkpoint, close, observation, request, stored

NAME = "pi05_micro_f32"
CONFIG = PI05Config(vision_num_heads=HEADS)


def engine_args(seed: int | None = None, **changed) -> EngineArgs:
    args = PI05Args(checkpoint(NAME), **{"config": CONFIG, "native_operators": "off", **changed})
    runtime = RuntimeConfig(num_threads=1, seed=seed)
    return EngineArgs("pi05", args, EngineConfig(DeviceConfig("cpu", "float32"), runtime))


@pytest.fixture(scope="module")
def engine():
    with Engine(engine_args(max_batch_size=2)) as engine:
        yield engine


def singles() -> list[PI05Request]:
    """The fixture's observations, one a request; what a fourth field says of masks stays."""
    fields = observation(NAME)
    return [
        PI05Request(**{name: one[at : at + 1] for name, one in fields.items()}) for at in (0, 1)
    ]


def test_a_request_of_two_rows_ends_as_one(engine):
    found = engine.step(request(NAME))
    assert found.shape == (2, 10, 32) and found.dtype == torch.float32
    close(found, stored(NAME)["out.x_final_padded"])


def test_requests_may_have_any_names(engine):
    futures = [engine.submit(request(NAME), rid="a")]
    futures += [engine.submit(singles()[0], rid=rid) for rid in ("a#0", "a#1", "a#0#0")]
    assert [len(one.result(30)) for one in futures] == [2, 1, 1, 1]


def test_outputs_belong_to_the_caller(engine):
    first = engine.step(request(NAME))
    kept = first.clone()
    engine.step(replace(request(NAME), noise=torch.zeros(2, 10, 32)))
    assert torch.equal(first, kept)
    first.zero_()
    assert torch.equal(engine.step(request(NAME)), kept)


def test_r83_a_single_row_with_the_default_contract(engine):
    """Three cameras, 200 tokens, and nothing else given."""
    given = singles()[0]
    plain = PI05Request(given.pixel_values, given.input_ids, given.lang_lens)
    assert engine.plugin.request_cls is PI05Request
    assert tuple(engine.step(plain).shape) == (1, 10, 32)


def test_noise_follows_the_engine_s_seed():
    def drawn(seed: int) -> list[torch.Tensor]:
        with Engine(engine_args(seed)) as engine:
            return [engine.step(replace(singles()[0], noise=None)) for _ in range(2)]

    one, again, other = drawn(3), drawn(3), drawn(4)
    assert all(map(torch.equal, one, again))
    assert not torch.equal(one[0], one[1]) and not torch.equal(one[0], other[0])


def test_a_rollout_is_not_a_request_of_step(engine):
    rollout = PI05RolloutRequest(**observation(NAME), sigmas=torch.zeros(2, 3))
    with pytest.raises(TypeError, match="PI05RolloutRequest"):
        engine.step(rollout)


def test_bad_requests_are_refused_by_the_engine(engine):
    with pytest.raises(InvalidRequestError, match="lang_lens"):
        engine.step(replace(request(NAME), lang_lens=torch.tensor([0, 1])))


def test_a_cancelled_request_has_no_actions(engine):
    entry = PI05Entry()
    with use_engine_config(FLOAT32):
        entry.setup(engine_args(max_batch_size=2).plugin_args)
    entry.start("a", request(NAME))
    for _ in range(4):
        entry.tick()
    entry.cancel("a")
    (end,) = entry.tick()
    assert end.cancelled and bool(torch.isnan(end.payload).all())
    assert tuple(end.payload.shape) == (2, 10, 32) and not entry.busy
    entry.close()


@pytest.mark.parametrize("policy", ["pi05", "pi0"])
def test_the_entries_pass_the_check_for_plugins(policy):
    def made():
        entry, args = PI05Entry(), engine_args(max_batch_size=4).plugin_args
        if policy == "pi0":
            config = PI0Config(vision_num_heads=HEADS)
            directory = checkpoint("pi0_tiny_f32")
            entry, args = PI0Entry(), PI0Args(directory, config=config, max_batch_size=4)
        with use_engine_config(FLOAT32):
            entry.setup(args)
        return entry

    name = NAME if policy == "pi05" else "pi0_tiny_f32"
    check_batching_entry(made, [request(name), request(name, num_steps=3), request(name)])


def test_r90_parallel_topologies_are_refused():
    """It runs on single ranks; several copies are replicas."""
    for parallel in (
        ParallelConfig(dense=DenseParallelConfig(tp_size=2)),
        ParallelConfig(attention=AttentionParallelConfig(tp_size=2)),
        ParallelConfig(outer=OuterParallelConfig(cfg_size=2)),
    ):
        with pytest.raises(ConfigurationError, match="runs on a single rank"):
            PI05Entry.validate_parallel(parallel)
    PI05Entry.validate_parallel(ParallelConfig())


def infer_many(requests, checkpoint_dir, devices=(0, 1)):
    """The document's helper, but for a CPU as the target, and a tower whose heads have to be told."""
    args = EngineArgs(
        plugin="pi05",
        plugin_args=PI05Args(
            checkpoint_dir=checkpoint_dir,
            max_batch_size=1,
            config=CONFIG,
        ),
        config=EngineConfig(
            device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        ),
    )
    with Engine(
        args,
        deployment=DeploymentConfig.local(devices=devices, replica_count=len(devices)),
    ) as engine:
        futures = [engine.submit(request) for request in requests]
        return [future.result().cpu() for future in futures]


@pytest.mark.long
def test_r82_infer_many_of_the_document():
    asked = singles() * 2
    for at, actions in enumerate(infer_many(asked, checkpoint(NAME))):
        close(actions, stored(NAME)["out.x_final_padded"][at % 2 : at % 2 + 1])


@pytest.mark.long
def test_r74_r79_every_replica_is_a_whole_policy():
    """As many as `replica_count`, each with all of the checkpoint: all give LeRobot's actions."""
    deployment = DeploymentConfig.local(devices=(0, 1), replica_count=2)
    with Engine(engine_args(), deployment=deployment) as engine:
        futures = [engine.submit(one) for one in singles() * 2]
        for at, future in enumerate(futures):
            close(future.result(), stored(NAME)["out.x_final_padded"][at % 2 : at % 2 + 1])
        served = [replica.num_completed for replica in engine.statistics().replicas]
    assert sum(served) == 4 and len(served) == 2 and min(served) >= 1


def test_files_of_weights_are_refused_with_what_to_do_instead(engine):
    with pytest.raises(
        InvalidRequestError, match="LoadWeights; its weights come by ReplaceWeights"
    ):
        engine.control(LoadWeights("anywhere", "1"))
