"""Operations through the whole engine: replicas in workers, and ranks of one replica."""

from __future__ import annotations

import threading

import pytest
import torch

from phalanx import (
    AttentionParallelConfig,
    DenseParallelConfig,
    DeploymentConfig,
    DeviceConfig,
    Engine,
    EngineArgs,
    EngineConfig,
    ParallelConfig,
    RuntimeConfig,
)
from phalanx.errors import EngineAsleepError, InvalidRequestError
from phalanx.models.causal_lm.args import CausalLMArgs
from phalanx.schema.control import (
    CheckWeights,
    Continue,
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
from phalanx.server import WorkerSupervisorConfig
from tests.engine.ports import free_base_port
from tests.models.operated import request, save, tiny_llama, weights_of
from tests.models.test_weight_groups import receive, training

WEIGHTS = frozenset({MemoryTag.WEIGHTS})
CHECKSUM = CheckWeights(WeightCheck.CHECKSUM)


def mid_size():
    """Weights of 90 MB, which a resident set shows."""
    return tiny_llama(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.08,
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    base = tmp_path_factory.mktemp("operated")
    return save(base / "a", 0, mid_size), save(base / "b", 1, mid_size)


def engine(directory, *, replica_count=0, tp=1, **options) -> Engine:
    """In this process, or as so many replicas in workers."""
    parallel = ParallelConfig(
        dense=DenseParallelConfig(tp_size=tp), attention=AttentionParallelConfig(tp_size=tp)
    )
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1), parallel)
    deployment = None
    if replica_count:
        process = WorkerSupervisorConfig(base_port=free_base_port(replica_count))
        deployment = DeploymentConfig.local(replica_count=replica_count, process_config=process)
    args = CausalLMArgs(str(directory), page_size=4, pool_tokens=4096, **options)
    return Engine(EngineArgs("causal_lm", args, config), deployment=deployment)


def tokens(engine: Engine, count: int = 1) -> set[tuple[tuple[int, ...], str]]:
    """What the replicas say, each asked at least once by `count` requests at a time."""
    futures = [engine.submit(request(9, 6)) for _ in range(count)]
    outputs = [future.result() for future in futures]
    return {(one.completions[0].token_ids, one.weight_version) for one in outputs}


@pytest.fixture(scope="module")
def expected(two):
    """What each checkpoint says."""
    said = []
    for directory in two:
        with engine(directory) as alone:
            [(ids, _)] = tokens(alone)
            said.append(ids)
    assert said[0] != said[1]
    return said


def check_operations(running: Engine, two, expected, num_replicas: int) -> None:
    """Every way in and out, twice: nothing of the first time is in the way of the second."""
    first, second = two
    count = 2 * num_replicas
    ends = []
    for _ in range(2):
        assert tokens(running, count) == {(expected[0], running.version)}
        before = running.memory.rss_bytes
        assert running.control(Sleep())
        asleep = running.memory
        # Packed weights and the mapped file: more than once their 90 MB is given back.
        assert before - asleep.rss_bytes > num_replicas * 80e6
        assert asleep.resident == frozenset()
        with pytest.raises(EngineAsleepError):
            running.submit(request())
        assert running.control(Wake(WEIGHTS))
        assert running.memory.resident == WEIGHTS
        with pytest.raises(EngineAsleepError):
            running.submit(request())
        assert running.control(Wake())
        assert tokens(running, count) == {(expected[0], running.version)}

        assert running.control(LoadWeights(str(second), "loaded"))
        assert tokens(running, count) == {(expected[1], "loaded")}
        assert running.control(Sleep(WEIGHTS))
        assert running.control(Wake())
        assert running.memory.waiting_for_weights
        with pytest.raises(EngineAsleepError, match="waits for weights"):
            running.submit(request())
        assert running.control(ReplaceWeights(weights_of(first), "replaced"))
        assert running.version == "replaced"
        assert tokens(running, count) == {(expected[0], "replaced")}
        assert running.control(LoadWeights(str(first), "static"))
        ends.append(running.memory.rss_bytes)
    assert ends[1] < ends[0] + 60e6


def check_refusals(running: Engine, expected, num_replicas: int) -> None:
    """What does not fit reaches the caller, and the engine goes on."""
    bad = {"model.norm.weight": torch.zeros(3)}
    with pytest.raises(InvalidRequestError, match=r"\(3,\)") as raised:
        running.control(ReplaceWeights({**bad}, "bad"))
    assert raised.value.field == "model.norm.weight"
    with pytest.raises(InvalidRequestError, match="nowhere") as raised:
        running.control(LoadWeights("/nowhere", "bad"))
    assert raised.value.field == "path"
    with pytest.raises(InvalidRequestError, match="not one of"):
        running.ask(ReadWeight("nothing", 1))
    assert tokens(running, 2 * num_replicas) == {(expected[0], "static")}


def check_answers(running: Engine, two, num_replicas: int) -> None:
    samples = running.ask(ReadWeight("model.layers.5.self_attn.k_proj.weight", 700))
    weight = weights_of(two[0])["model.layers.5.self_attn.k_proj.weight"]
    assert len(samples) == num_replicas
    assert {one.values for one in samples} == {tuple(weight.flatten()[:700].tolist())}
    assert {one.shape for one in samples} == {tuple(weight.shape)}
    reports = running.ask(CHECKSUM)
    assert len(reports) == num_replicas
    assert len({report.checksum for report in reports}) == 1


def check_running_across_an_update(running: Engine, two) -> None:
    """Held while all sleeps, and gone on with other weights."""
    stream = running.stream(request(9, 100), rid="across")
    next(stream)
    assert running.control(Pause(PauseMode.IN_PLACE))
    assert running.control(Sleep())
    assert running.control(Wake(WEIGHTS))
    assert running.control(LoadWeights(str(two[1]), "v2"))
    assert running.control(Wake())
    assert running.control(Continue())
    *_, output = stream
    (before, count), (after, rest) = output.weight_versions
    assert (before, after, count + rest) == ("static", "v2", 100)
    assert running.control(LoadWeights(str(two[0]), "static"))


def test_complaint_slime_579_memory_is_free_when_a_sleep_returns(two, expected):
    with engine(two[0]) as running:
        check_operations(running, two, expected, 1)
        check_refusals(running, expected, 1)
        check_answers(running, two, 1)
        check_running_across_an_update(running, two)


def test_a_policy_controller_may_put_weights_in_too(two, expected):
    with engine(two[0]) as running:
        running.begin_weight_update()
        with pytest.raises(InvalidRequestError):
            running.update_weights({"nothing": torch.zeros(3)})
        running.abort_weight_update()
        running.begin_weight_update()
        for name, tensor in weights_of(two[1]).items():
            running.update_weights({name: tensor})
        assert running.finish_weight_update("v7") == "v7" == running.version
        assert tokens(running) == {(expected[1], "v7")}


@pytest.mark.long
def test_two_replicas_in_workers(two, expected):
    with engine(two[0], replica_count=2) as running:
        check_operations(running, two, expected, 2)
        check_refusals(running, expected, 2)
        check_answers(running, two, 2)
        check_running_across_an_update(running, two)
        with training(two[1], world=3) as join:
            assert running.control(join)
            assert running.control(receive(two[1], "received"))
        assert running.version == "received"
        assert tokens(running, 4) == {(expected[1], "received")}


@pytest.mark.long
def test_two_ranks_of_one_replica(two, expected):
    with engine(two[0], replica_count=1, tp=2) as running:
        check_operations(running, two, expected, 1)
        check_refusals(running, expected, 1)
        check_answers(running, two, 1)
        check_running_across_an_update(running, two)
        with training(two[1], world=3) as join:
            assert running.control(join)
            assert running.control(receive(two[1], "received"))
        assert tokens(running, 2) == {(expected[1], "received")}


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"speculate": True}])
def test_many_requests_over_many_updates_and_sleeps_end_once_each(two, options):
    """Requests come all the time; each ends with whole answers, or is refused while all sleeps."""
    first, second = two
    ended = []
    with engine(first, **options) as running:
        stop = threading.Event()

        def ask(index):
            number = 0
            while not stop.is_set():
                number += 1
                try:
                    output = running.step(request(5 + index, 12, first=number % 50))
                except EngineAsleepError:
                    continue
                ended.append(output)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for index in range(8):
            assert running.control(LoadWeights(str((second, first)[index % 2]), f"v{index}"))
            assert running.control(Pause(PauseMode.IN_PLACE))
            assert running.control(Sleep(frozenset({MemoryTag.KV_CACHE})))
            assert running.control(Wake())
            assert running.control(Continue())
        stop.set()
        for thread in threads:
            thread.join()
        statistics = running.statistics()
        assert statistics.num_completed == len(ended)
        assert statistics.num_failed == statistics.num_in_flight == 0
    assert all(sum(count for _, count in one.weight_versions) == 12 for one in ended)
