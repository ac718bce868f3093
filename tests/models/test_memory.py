"""A service that gives its memory back by tags and takes it again: what it does in between."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import replace as changed

import msgspec
import pytest
import torch

from phalanx.device.cpu import CpuBackend
from phalanx.engine_config import use_engine_config
from phalanx.errors import EngineAsleepError, InvalidRequestError
from phalanx.schema.control import (
    ALL_TAGS,
    CheckWeights,
    Continue,
    Flush,
    LoadWeights,
    MemoryTag,
    Pause,
    PauseMode,
    ReadWeight,
    ReplaceWeights,
    Sleep,
    Wake,
    WeightCheck,
)
from phalanx.schema.generate import GenerateRequest
from tests.models.driver import BFLOAT16, FLOAT32, Drive, load
from tests.models.operated import (
    answer,
    answer_of,
    check_spans,
    drive,
    go_on,
    oracle,
    paused,
    request,
    save,
    save_changed,
    tick,
    update,
    weights_of,
)

KV = frozenset({MemoryTag.KV_CACHE})
WEIGHTS = frozenset({MemoryTag.WEIGHTS})
GRAPHS = frozenset({MemoryTag.CUDA_GRAPH})


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    base = tmp_path_factory.mktemp("memory")
    return save(base / "a", 0), save(base / "b", 1)


def sleep(driven: Drive, tags=ALL_TAGS) -> None:
    assert driven.service.control(Sleep(tags))


def wake(driven: Drive, tags=ALL_TAGS) -> None:
    assert driven.service.control(Wake(tags))


def refused(driven: Drive, rid="refused") -> str:
    driven.start(rid, request())
    driven.tick()
    error = driven.error(rid)
    assert isinstance(error, EngineAsleepError)
    return str(error)


@pytest.mark.parametrize(
    ("config", "options"),
    [(FLOAT32, {}), (FLOAT32, {"native_operators": "off"}), (BFLOAT16, {"quantization": "int8"})],
)
def test_static_weights_come_back_from_where_they_were_loaded(two, config, options):
    driven = drive(two[0], config, **options)
    packed = driven.service.weights.packed_bytes
    for _ in range(3):
        sleep(driven)
        assert driven.service.weights.packed_bytes == 0
        wake(driven)
        assert not driven.service.statistics().waiting_for_weights
        assert answer(driven) == answer_of(two[0], config, **options)
        assert driven.service.weights.packed_bytes == packed


def test_nothing_of_the_weights_or_the_cache_stays_behind(two):
    driven = drive(two[0])
    decoder = driven.service._node.decoder
    storage = driven.service._cache._storage
    held = [weakref.ref(one) for one in decoder.parameters()]
    held += [weakref.ref(one) for pair in storage._layers for one in pair]
    sleep(driven)
    gc.collect()
    assert [one() for one in held if one() is not None and not one().is_meta] == []
    assert all(parameter.is_meta for parameter in decoder.parameters())
    assert storage.released


def test_complaint_dynamo_13823_it_computes_only_when_every_tag_is_resident(two):
    """Two tagged wakes, weights then kv_cache: the first one is not the whole."""
    driven = drive(two[0])
    sleep(driven)
    for tags, missing in ((WEIGHTS, "cuda_graph, kv_cache"), (KV, "cuda_graph")):
        wake(driven, tags)
        assert missing in refused(driven, f"without {missing}")
        wake(driven, tags)
        assert missing in refused(driven, f"again without {missing}")
    wake(driven, GRAPHS)
    assert answer(driven) == answer_of(two[0])


@pytest.mark.parametrize("order", [(KV, WEIGHTS, GRAPHS), (GRAPHS, WEIGHTS, KV)])
def test_i81_tags_go_and_come_in_any_order(two, order):
    driven = drive(two[0])
    asleep = frozenset()
    for tags in (*order, *order):
        sleep(driven, tags)
        asleep |= tags
        assert driven.service.statistics().asleep == asleep
    for tags in (order[1], order[1], order[2], order[0]):
        wake(driven, tags)
        asleep -= tags
        assert driven.service.statistics().asleep == asleep
    assert answer(driven) == answer_of(two[0])


def test_it_sleeps_only_when_nothing_runs_or_all_is_paused(two):
    driven = drive(two[0])
    driven.start("r", request(6, 12))
    tick(driven, 3)
    assert driven.service.control(Sleep()) is False
    assert driven.service.statistics().asleep == frozenset()
    driven.finish()
    sleep(driven)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
@pytest.mark.parametrize("tags", [ALL_TAGS, KV, WEIGHTS, GRAPHS])
@pytest.mark.parametrize("options", [{}, {"speculate": True}, {"host_pool_tokens": 64}])
def test_what_was_paused_is_held_and_computed_anew(two, mode, tags, options):
    driven = drive(two[0], **options)
    wanted = [request(5, 20), request(9, 14, first=2, n=2)]
    for index, one in enumerate(wanted):
        driven.start(f"r{index}", one)
    tick(driven, 4)
    assert driven.service.control(Pause(mode))
    driven.start("late", request(4, 6))
    sleep(driven, tags)
    # Going on is not yet possible, and not refused.
    go_on(driven)
    driven.tick()  # reports what a step that was in flight has given
    assert not driven.service.busy
    wake(driven)
    driven.finish()
    expected = drive(two[0]).run(*wanted, request(4, 6))
    for rid, one in zip(("r0", "r1", "late"), expected, strict=True):
        output = driven.output(rid)
        assert [each.token_ids for each in output.completions] == [
            each.token_ids for each in one.completions
        ]
        assert {name for name, _ in output.weight_versions} == {"default"}


def test_held_requests_go_on_with_the_weights_that_came_meanwhile(two):
    first, second = two
    driven = drive(first)
    driven.start("r", request(6, 10))
    tick(driven, 4)
    paused(driven)
    sleep(driven)
    wake(driven, WEIGHTS)
    update(driven, second, "v2")
    wake(driven)
    go_on(driven)
    driven.finish()
    output = driven.output("r")
    assert output.weight_versions == (("default", 4), ("v2", 6))
    check_spans(output, request(6).input_ids, {"default": oracle(first), "v2": oracle(second)})


def test_a_held_request_can_be_cancelled_while_all_sleeps(two):
    driven = drive(two[0])
    driven.start("r", request(6, 10))
    tick(driven, 4)
    paused(driven)
    sleep(driven)
    driven.service.cancel("r")
    driven.tick()
    assert len(driven.output("r").completions[0].token_ids) == 4
    assert driven.service.control(Flush())


@pytest.mark.parametrize(
    "others",
    [
        lambda second: LoadWeights(str(second)),
        lambda second: ReplaceWeights(weights_of(second)),
        lambda second: ReplaceWeights({"model.norm.weight": torch.ones(32)}),
    ],
)
def test_replaced_weights_are_awaited_after_a_sleep(two, others):
    first, second = two
    driven = drive(first)
    assert driven.service.control(others(second))
    sleep(driven)
    wake(driven)
    statistics = driven.service.statistics()
    assert statistics.waiting_for_weights
    assert statistics.asleep == frozenset()
    assert "waits for weights" in refused(driven)
    with pytest.raises(InvalidRequestError, match="waits for weights"):
        driven.service.ask(ReadWeight("model.norm.weight", 1))
    # Sleeping on is possible, and changes nothing of that.
    sleep(driven, WEIGHTS)
    wake(driven, WEIGHTS)
    assert driven.service.statistics().waiting_for_weights
    update(driven, second)
    assert not driven.service.statistics().waiting_for_weights
    assert answer(driven) == answer_of(second)


@pytest.mark.parametrize("as_one", [False, True])
def test_they_may_come_in_parts_and_the_last_one_ends_the_wait(two, as_one):
    first, second = two
    driven = drive(first)
    update(driven, second)
    sleep(driven, WEIGHTS)
    wake(driven, WEIGHTS)
    tensors = weights_of(second, as_one=as_one)
    for name, tensor in reversed(tensors.items()):
        assert driven.service.statistics().waiting_for_weights
        # Twice the same is not two parts.
        for _ in range(2):
            assert driven.service.control(ReplaceWeights({name: tensor}, "v2"))
    assert not driven.service.statistics().waiting_for_weights
    assert answer(driven) == answer_of(second)


@pytest.mark.parametrize("ask", [CheckWeights(WeightCheck.CHECKSUM), ReadWeight("lm_head", 1)])
def test_weights_that_are_away_are_neither_read_nor_replaced(two, ask):
    driven = drive(two[0])
    sleep(driven, WEIGHTS)
    with pytest.raises(InvalidRequestError, match=r"given back.*Wake"):
        driven.service.ask(ask)
    for op in (LoadWeights(str(two[1])), ReplaceWeights({})):
        with pytest.raises(InvalidRequestError, match=r"given back.*Wake"):
            driven.service.control(op)
    wake(driven)
    assert answer(driven) == answer_of(two[0])


def test_the_checkpoint_that_was_loaded_first_may_come_back_again(two):
    first, second = two
    driven = drive(first)
    update(driven, second)
    update(driven, first)
    sleep(driven)
    wake(driven)
    assert answer(driven) == answer_of(first)


def test_a_checkpoint_that_was_written_anew_is_not_what_was_served(two, tmp_path):
    first, second = two
    copied = save_changed(first, tmp_path / "copy", lambda tensors: None)
    driven = drive(copied)
    sleep(driven)
    other = save_changed(second, tmp_path / "other", lambda tensors: None)
    os.replace(other / "model.safetensors", copied / "model.safetensors")
    wake(driven)
    assert driven.service.statistics().waiting_for_weights
    update(driven, copied)
    assert answer(driven) == answer_of(second)


def test_a_directory_that_a_trainer_writes_to_may_be_written_in_place_after_a_wake(two, tmp_path):
    first, second = two
    copied = save_changed(first, tmp_path / "copy", lambda tensors: None)
    driven = drive(copied, native_operators="off")
    update(driven, second)
    update(driven, copied)
    sleep(driven)
    wake(driven)
    weights = copied / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 3)
        file.write(bytes(weights.stat().st_size // 2))
    assert answer(driven) == answer_of(first, native_operators="off")


def test_what_is_held_for_another_engine_is_waited_for(two):
    driven = drive(two[0])
    driven.start("handed", msgspec.structs.replace(request(9, 4), hands_over=True))
    while driven.service.busy:
        driven.tick()
    assert driven.service.control(Sleep(KV)) is False
    assert driven.service.statistics().asleep == frozenset()
    sleep(driven, WEIGHTS)
    wake(driven)
    driven.service._handing.drop(driven.output("handed").handoff, "nobody wants it")
    driven.service.close()


def test_captures_go_and_come_with_their_tag(two):
    model = load(two[0], native_operators="off")
    captured = changed(model, backend=CpuBackend(capture="tape"))
    driven = Drive(captured, max_batch_size=2, context_length=64, page_size=4)
    graphs = driven.service._engine._nodes["decoder"].graphs._graphs
    made = list(graphs.captures)
    before = answer(driven, request())
    for tags in (GRAPHS, KV, WEIGHTS, ALL_TAGS):
        sleep(driven, tags)
        assert not graphs.captures
        wake(driven, tags)
        assert list(graphs.captures) == made
        assert answer(driven, request()) == before


def test_a_pause_that_aborts_keeps_the_tokens_and_then_all_may_sleep(two):
    driven = drive(two[0])
    driven.start("r", request(6, 12))
    tick(driven, 5)
    assert driven.service.control(Pause(PauseMode.ABORT))
    driven.tick()
    output = driven.output("r")
    assert len(output.completions[0].token_ids) == 5
    sleep(driven)
    wake(driven)
    assert driven.service.control(Continue())
    # The caller goes on where it was cut off.
    so_far = (*request(6).input_ids, *output.completions[0].token_ids)
    rest = GenerateRequest(input_ids=so_far, sampling=request(6, 7).sampling, detokenize=False)
    [went_on] = driven.run(rest)
    [whole] = drive(two[0]).run(request(6, 12))
    tokens = output.completions[0].token_ids + went_on.completions[0].token_ids
    assert tokens == whole.completions[0].token_ids


def test_a_service_that_was_never_woken_closes(two):
    with use_engine_config(FLOAT32):
        driven = drive(two[0])
    paused(driven)
    driven.start("r", request())
    sleep(driven)
    driven.service.close()
