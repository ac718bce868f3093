"""Tensor-parallel SmolLM2 through the whole engine: local workers, and a launcher's ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import (
    AttentionParallelConfig,
    DenseParallelConfig,
    DeploymentConfig,
    DeviceConfig,
    Engine,
    EngineArgs,
    EngineConfig,
    MoeParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
    RuntimeConfig,
)
from phalanx.errors import ConfigurationError
from phalanx.models.causal_lm.args import CausalLMArgs
from phalanx.schema.control import Continue, Flush, Pause, PauseMode
from phalanx.server import WorkerSupervisorConfig
from tests.engine.ports import free_base_port
from tests.engine.processes import children
from tests.models.logged_causal_lm import LoggedCausalLM, LoggedCausalLMArgs, read_logs
from tests.models.test_greedy import KNOWN, chat_ids, greedy, ids_of

Engine.register(LoggedCausalLM)
EXTERNAL = Path(__file__).parents[2] / "examples" / "external.py"
TALE = "Once upon a time there was a lighthouse. " * 14


def config(tp):
    return EngineConfig(
        DeviceConfig("cpu", "float32"),
        RuntimeConfig(num_threads=1),
        ParallelConfig(
            dense=DenseParallelConfig(tp_size=tp), attention=AttentionParallelConfig(tp_size=tp)
        ),
    )


def local(replica_count=1):
    return DeploymentConfig.local(
        replica_count=replica_count,
        process_config=WorkerSupervisorConfig(base_port=free_base_port(replica_count)),
    )


@pytest.fixture(scope="module")
def crowded(smollm2_dir, tmp_path_factory):
    """Two replicas of two ranks with little memory, and where each rank notes its batches."""
    logs = tmp_path_factory.mktemp("batches")
    args = LoggedCausalLMArgs(
        checkpoint_dir=str(smollm2_dir),
        context_length=256,
        pool_tokens=352,
        max_batch_size=8,
        max_step_tokens=64,
        log_dir=str(logs),
    )
    with Engine(EngineArgs("logged_causal_lm", args, config(2)), deployment=local(2)) as engine:
        yield engine, logs


@pytest.mark.long
def test_r89_item_8_5_14_two_replicas_of_two_ranks_agree_with_one_rank_and_with_themselves(
    crowded, smollm2
):
    engine, logs = crowded
    requests = [greedy(chat_ids(smollm2, prompt)) for prompt in KNOWN]
    tale = smollm2.tokenizer.encode(TALE)
    long = [greedy(tale[:length], max_new_tokens=24, ignore_eos=True) for length in (90, 121, 100)]
    # All arrive together, however busy the machine: more than the cache has room for.
    assert engine.control(Pause(PauseMode.IN_PLACE))
    futures = [engine.submit(request) for request in [*requests, *long, *requests, *long]]
    assert engine.control(Continue())
    outputs = [ids_of(future.result()) for future in futures]
    assert outputs[:3] == outputs[6:9] == list(KNOWN.values())
    assert outputs[3:6] == outputs[9:]
    # Operations and a cancel in between reach all ranks at the same point.
    future = engine.submit(greedy(tale[:60], max_new_tokens=150, ignore_eos=True), rid="cut")
    assert engine.control(Pause(PauseMode.RETRACT))
    assert engine.control(Flush())  # what waits has nothing of the cache
    assert engine.cancel("cut")
    assert engine.control(Continue())
    assert len(ids_of(future.result())) < 150
    *deltas, last = engine.stream(requests[0])
    assert ids_of(last) == outputs[0] and deltas
    replicas = read_logs(logs)
    assert len(replicas) == 2
    for first, second in replicas.values():
        assert first == second
    lines = [line for ranks in replicas.values() for line in ranks[0]]
    assert any("pushed_back" in line for line in lines)
    assert any(len(line.get("rows", ())) > 1 for line in lines)


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        (ParallelConfig(outer=OuterParallelConfig(cfg_size=2)), "cfg"),
        (ParallelConfig(moe=MoeParallelConfig(ep_size=2)), "moe"),
        (ParallelConfig(outer=OuterParallelConfig(pipeline_size=2)), "pipeline"),
        (ParallelConfig(attention=AttentionParallelConfig(cp_size=2)), "attention"),
    ],
)
def test_r16_r18_other_domains_are_refused_before_any_process_starts(parallel, named, smollm2_dir):
    args = CausalLMArgs(checkpoint_dir=str(smollm2_dir))
    refused = EngineConfig(DeviceConfig("cpu", "float32"), parallel=parallel)
    before = children()
    with pytest.raises(ConfigurationError, match=named):
        Engine(EngineArgs("causal_lm", args, refused), deployment=local())
    assert children() == before


@pytest.mark.long
def test_r36_r38_the_external_example_prints_on_the_output_rank_only():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXTERNAL)], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("The capital of France is Paris")
    assert ended.stdout.count("The capital") == 1
