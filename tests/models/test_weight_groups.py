"""Weights that a trainer in a process of its own broadcasts to a running engine."""

from __future__ import annotations

import multiprocessing as mp
from contextlib import contextmanager

import pytest

from phalanx.errors import InvalidRequestError, WeightUpdateError
from phalanx.schema.control import JoinWeightGroup, LeaveWeightGroup, ReceiveWeights
from tests.models.operated import answer, answer_of, drive, save, weights_of
from tests.models.trainer import broadcast
from tests.parallel.rank_pool import free_port


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    base = tmp_path_factory.mktemp("groups")
    return save(base / "a", 0), save(base / "b", 1)


@contextmanager
def training(directory, world=2, group="g", count=None, port=None):
    """A trainer that sends a checkpoint; yields how to join it."""
    port = free_port() if port is None else port
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([broadcast.__module__])
    ours, theirs = context.Pipe()
    arguments = (port, world, group, str(directory / "model.safetensors"), count, theirs)
    process = context.Process(target=broadcast, args=arguments, daemon=True)
    process.start()
    theirs.close()
    try:
        yield JoinWeightGroup("127.0.0.1", port, 1, world, group, "gloo")
    finally:
        ours.close()
        process.join()
    assert process.exitcode == 0


def receive(directory, version=None, group="g"):
    tensors = weights_of(directory)
    return ReceiveWeights(
        tuple(tensors),
        tuple(str(tensor.dtype) for tensor in tensors.values()),
        tuple(tuple(tensor.shape) for tensor in tensors.values()),
        group,
        version,
    )


def test_a_trainer_broadcasts_new_weights(two):
    first, second = two
    driven = drive(first)
    with training(second) as join:
        for _ in range(2):  # joining again what is joined changes nothing
            assert driven.service.control(join)
        assert driven.service.control(receive(second, "v2"))
    assert answer(driven) == answer_of(second)
    for _ in range(2):
        assert driven.service.control(LeaveWeightGroup("g"))
    with pytest.raises(InvalidRequestError, match="not joined"):
        driven.service.control(receive(second))


def test_a_trainer_that_ends_too_early_changes_nothing(two):
    first, second = two
    driven = drive(first)
    with training(second, count=3) as join:
        assert driven.service.control(join)
        with pytest.raises(WeightUpdateError, match=r"Nothing has changed.*join"):
            driven.service.control(receive(second, "v2"))
    assert answer(driven) == answer_of(first)
    with pytest.raises(InvalidRequestError, match="not joined"):
        driven.service.control(receive(second))


def test_a_trainer_that_was_started_anew_is_joined_anew(two):
    first, second = two
    driven = drive(first)
    with training(second, count=0) as join:
        assert driven.service.control(join)
    with training(second, port=join.master_port) as again:
        assert again == join
        assert driven.service.control(again)
        assert driven.service.control(receive(second, "v2"))
    assert answer(driven) == answer_of(second)


@pytest.mark.parametrize(
    ("op", "field"),
    [
        (JoinWeightGroup("127.0.0.1", 1, 1, 2, "g", "nccl"), "backend"),
        (JoinWeightGroup("127.0.0.1", 1, 0, 2, "g", "gloo"), "rank_offset"),
        (JoinWeightGroup("127.0.0.1", 1, 2, 2, "g", "gloo"), "rank_offset"),
        (ReceiveWeights((), (), (), "nobody"), "group_name"),
    ],
)
def test_what_cannot_be_is_refused_before_anybody_waits(two, op, field):
    with pytest.raises(InvalidRequestError) as raised:
        drive(two[0]).service.control(op)
    assert raised.value.field == field


NORM = "model.norm.weight"


def test_announced_tensors_that_do_not_fit_are_refused_before_they_come(two):
    driven = drive(two[0])
    with training(two[1], count=0) as join:
        assert driven.service.control(join)
    for names, dtypes, shapes, reason in (
        ((NORM,), ("float32",), ((31,),), "shape"),
        (("nothing",), ("float32",), ((32,),), "not one of"),
        ((NORM,), ("int8",), ((32,),), "int8"),
        ((NORM,), (), ((32,),), "equally many"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            driven.service.control(ReceiveWeights(names, dtypes, shapes, "g"))
    assert answer(driven) == answer_of(two[0])
    driven.service.close()
