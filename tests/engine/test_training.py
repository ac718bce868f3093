"""Rollouts and new weights, of a policy that runs in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from phalanx import DeploymentConfig, Engine, EngineArgs, EngineUnavailableError
from phalanx.errors import InvalidRequestError, WeightUpdateError
from phalanx.testing import ManualClock
from phalanx.testing.counting import CountingArgs

from .training_plugin import Scale, ScaleRollout, Scaling, ScalingArgs


@pytest.fixture(autouse=True)
def registered() -> None:
    if Scaling.name not in Engine.registered():
        Engine.register(Scaling)


def scaling(clock: ManualClock | None = None, **args: bool) -> Engine:
    return Engine(EngineArgs("scaling", ScalingArgs(**args)), clock=clock)


def weight(value: float) -> torch.Tensor:
    return torch.tensor([value])


def test_new_weights_are_served_once_they_are_finished_and_not_before():
    with scaling() as engine:
        engine.begin_weight_update()
        engine.update_weights({"scale": weight(2.0)})
        assert (engine.step(Scale(3.0)), engine.version) == (3.0, "default")
        assert engine.finish_weight_update() == "1"
        assert (engine.step(Scale(3.0)), engine.version) == (6.0, "1")


def test_a_later_batch_wins_and_the_caller_keeps_its_tensor():
    mine = weight(5.0)
    with scaling() as engine:
        engine.begin_weight_update()
        engine.update_weights([("scale", weight(2.0))])
        engine.update_weights(iter([("scale", mine)]))
        mine.zero_()
        assert engine.finish_weight_update(version=17) == "17"
        assert engine.step(Scale(1.0)) == 5.0


def test_an_update_that_is_aborted_changes_nothing_and_another_can_begin():
    with scaling() as engine:
        engine.begin_weight_update()
        engine.update_weights({"scale": weight(2.0)})
        engine.abort_weight_update()
        engine.abort_weight_update()
        assert (engine.step(Scale(3.0)), engine.version) == (3.0, "default")
        engine.begin_weight_update()


def test_a_batch_that_was_refused_can_never_be_finished():
    with scaling() as engine:
        engine.begin_weight_update()
        with pytest.raises(
            InvalidRequestError, match=r"'bias' of shape \(1,\); the model has scale"
        ):
            engine.update_weights({"scale": weight(2.0), "bias": weight(1.0)})
        with pytest.raises(WeightUpdateError, match="incomplete; call abort_weight_update"):
            engine.update_weights({"scale": weight(2.0)})
        with pytest.raises(WeightUpdateError, match="incomplete; call abort_weight_update"):
            engine.finish_weight_update()
        engine.abort_weight_update()
        assert engine.step(Scale(3.0)) == 3.0


def test_an_iterable_that_raises_breaks_the_update_too():
    def half() -> object:
        yield "scale", weight(2.0)
        raise OSError("the controller's file has ended")

    with scaling() as engine:
        engine.begin_weight_update()
        with pytest.raises(OSError, match="has ended"):
            engine.update_weights(half())
        with pytest.raises(WeightUpdateError, match="incomplete"):
            engine.finish_weight_update()


def test_out_of_order_calls_are_refused():
    with scaling() as engine:
        for call in (lambda: engine.update_weights({}), engine.finish_weight_update):
            with pytest.raises(WeightUpdateError, match=r"call begin_weight_update\(\) first"):
                call()
        engine.begin_weight_update()
        with pytest.raises(WeightUpdateError, match="the update has no weights"):
            engine.finish_weight_update()
        with pytest.raises(WeightUpdateError, match="is open; finish or abort it first"):
            engine.begin_weight_update()


def test_a_controller_that_died_blocks_neither_requests_nor_its_successor():
    clock = ManualClock()
    with scaling(clock) as engine:
        engine.begin_weight_update(ttl_s=10)
        engine.update_weights({"scale": weight(2.0)})
        clock.advance(9.5)
        engine.update_weights({"scale": weight(2.5)})
        clock.advance(9.5)
        with pytest.raises(WeightUpdateError, match="is open"):
            engine.begin_weight_update()
        clock.advance(0.5)
        assert engine.step(Scale(3.0)) == 3.0
        with pytest.raises(WeightUpdateError, match="nothing was heard of the update for 10 s"):
            engine.finish_weight_update()
        engine.begin_weight_update()
        engine.update_weights({"scale": weight(4.0)})
        engine.finish_weight_update()
        assert engine.step(Scale(3.0)) == 12.0


def test_a_batch_that_never_ends_blocks_neither_requests_nor_the_successor():
    clock, begun, ends = ManualClock(), threading.Event(), threading.Event()

    def endless() -> Iterator[tuple[str, torch.Tensor]]:
        yield "scale", weight(2.0)
        begun.set()
        ends.wait()

    with scaling(clock) as engine, ThreadPoolExecutor(1) as dying:
        engine.begin_weight_update(ttl_s=10)
        sent = dying.submit(engine.update_weights, endless())
        try:
            begun.wait()
            with pytest.raises(WeightUpdateError, match="a batch is still coming in"):
                engine.finish_weight_update()
            with pytest.raises(WeightUpdateError, match="is receiving a batch"):
                engine.begin_weight_update()
            assert engine.step(Scale(3.0)) == 3.0
            clock.advance(10)
            engine.begin_weight_update()
            engine.update_weights({"scale": weight(4.0)})
        finally:
            ends.set()
        with pytest.raises(WeightUpdateError, match="gave way to a new one"):
            sent.result()
        engine.finish_weight_update()
        assert engine.step(Scale(3.0)) == 12.0


def test_weights_that_cannot_be_put_in_end_the_engine():
    with scaling(breaks=True) as engine:
        engine.begin_weight_update()
        engine.update_weights({"scale": weight(2.0)})
        with pytest.raises(EngineUnavailableError, match="no room for the new weights"):
            engine.finish_weight_update()
        assert engine.version == "default"
        with pytest.raises(EngineUnavailableError, match="no room for the new weights"):
            engine.step(Scale(1.0))


def test_a_rollout_and_a_step_each_take_their_own_request():
    with scaling() as engine:
        assert engine.rollout_step(ScaleRollout(2.0, sigma=0.5)) == 2.5
        with pytest.raises(TypeError, match="takes Scale, not ScaleRollout"):
            engine.step(ScaleRollout(2.0))
        with pytest.raises(TypeError, match="takes ScaleRollout, not Scale"):
            engine.rollout_step(Scale(2.0))


def test_a_plugin_without_rollouts_or_weights_says_so():
    with Engine(EngineArgs("counting", CountingArgs())) as engine:
        with pytest.raises(InvalidRequestError, match="'counting' has no rollouts"):
            engine.rollout_step(object())
        with pytest.raises(InvalidRequestError, match="'counting' takes no new weights"):
            engine.begin_weight_update()


@pytest.mark.parametrize(
    "verb", ["rollout_step", "begin_weight_update", "finish_weight_update", "abort_weight_update"]
)
def test_r112_r113_managed_engines_refuse_before_they_start_anything(verb: str):
    deployment = DeploymentConfig.local(devices=(0,), auto_start=False)
    args = EngineArgs("scaling", ScalingArgs())
    with Engine(args, deployment=deployment) as engine:
        call = getattr(engine, verb)
        with pytest.raises(
            EngineUnavailableError,
            match="single external core.*let the RL framework manage its rollout workers",
        ):
            call(ScaleRollout(1.0)) if verb == "rollout_step" else call()
