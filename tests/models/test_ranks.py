"""What one rank of several does by itself: which topologies it takes, what it loads, how it fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.engine_config import (
    AttentionParallelConfig,
    DenseParallelConfig,
    DeviceConfig,
    EngineConfig,
    MoeParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)
from phalanx.errors import CheckpointError, ConfigurationError, PhalanxDistError
from phalanx.models.causal_lm.args import CausalLMArgs
from phalanx.models.causal_lm.entry import CausalLM
from phalanx.models.causal_lm.grammar import GrammarSource
from phalanx.models.causal_lm.grammar_queue import GrammarQueue, Prompt
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import FLOAT32, Drive, load
from tests.models.in_each_rank import pretended, tensor_parallel
from tests.models.references import fused
from tests.models.test_families import built, llama_with_linear_rope

Dense, Attention, Moe, Outer = (
    DenseParallelConfig,
    AttentionParallelConfig,
    MoeParallelConfig,
    OuterParallelConfig,
)
PROMPT = tuple(range(5, 25))


@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        (ParallelConfig(), None),
        (ParallelConfig(), 4),
        (ParallelConfig(dense=Dense(2)), None),
        (ParallelConfig(attention=Attention(4)), 4),
        (ParallelConfig(dense=Dense(2), attention=Attention(2), moe=Moe(2)), None),
    ],
)
def test_tensor_parallelism_over_all_ranks_is_accepted(parallel, world):
    CausalLM.validate_parallel(parallel, world)


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        (ParallelConfig(outer=Outer(cfg_size=2)), "outer.cfg_size=2"),
        (ParallelConfig(outer=Outer(pipeline_size=2)), "outer.pipeline_size=2"),
        (ParallelConfig(moe=Moe(ep_size=2)), "moe.ep_size=2"),
        (ParallelConfig(dense=Dense(2), moe=Moe(dp_size=2)), "moe.dp_size=2"),
        (ParallelConfig(dense=Dense(2, dp_size=2), attention=Attention(4)), "dense is .*dp_size=2"),
        (ParallelConfig(dense=Dense(2, sequence_parallel=True)), "sequence_parallel=True"),
        (ParallelConfig(dense=Dense(4), attention=Attention(2, cp_size=2)), "cp_size=2"),
        (
            ParallelConfig(dense=Dense(2), attention=Attention(dp_size=2)),
            "attention is .*dp_size=2",
        ),
        (ParallelConfig(attention=Attention(4, decode_cp_size=2)), "decode_cp_size=2"),
    ],
)
def test_other_splits_are_refused(parallel, named):
    with pytest.raises(ConfigurationError, match=named):
        CausalLM.validate_parallel(parallel)


def test_several_ranks_without_a_mesh_are_refused(tiny_dir):
    """Each would load the whole model and compute everything."""
    with pytest.raises(PhalanxDistError, match="no mesh is current here"):
        load(tiny_dir, FLOAT32.replace(parallel=tensor_parallel(2)))


def test_more_ranks_than_heads_are_refused_before_any_process_starts(tiny_dir):
    CausalLM.validate_args(CausalLMArgs(str(tiny_dir)), tensor_parallel(2))
    CausalLM.validate_args(CausalLMArgs("elsewhere"), tensor_parallel(64))
    with pytest.raises(ConfigurationError, match="size of 64 exceeds the"):
        CausalLM.validate_args(CausalLMArgs(str(tiny_dir)), tensor_parallel(64))


@pytest.mark.parametrize("rank", [0, 3])
def test_more_ranks_than_heads_are_refused(tmp_path, rank):
    built(llama_with_linear_rope).save_pretrained(tmp_path)
    with pretended(4, rank), pytest.raises(ConfigurationError, match="exceeds the 3 query heads"):
        load(tmp_path)


@pytest.mark.parametrize("rank", [None, 0, 1, 2])
def test_what_a_checkpoint_lacks_is_named_on_every_rank(tiny_dir, tmp_path, rank):
    """Also by the ranks that hold nothing of it."""
    directory = shutil.copytree(tiny_dir, tmp_path / "broken")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.0.self_attn.k_proj.weight"]
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(47, 32)
    weights["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(32)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        if rank is None:
            load(directory)
        else:
            with pretended(3, rank):
                load(directory)
    assert "missing model.layers.0.self_attn.k_proj.weight; " in str(caught.value)
    assert "unexpected model.layers.1.self_attn.o_proj.bias; " in str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight of (47, 32) instead of (48, 32)" in str(caught.value)


def test_a_rank_holds_its_part_and_leaves_rows_in_the_mapped_file(tiny_dir, tmp_path):
    """float16 is packed by nothing, so parameters stay as they were loaded."""
    directory = shutil.copytree(tiny_dir, tmp_path / "half")
    path = directory / "model.safetensors"
    weights = {name: tensor.half() for name, tensor in load_file(path).items()}
    save_file(fused(weights), path)
    half = EngineConfig(DeviceConfig("cpu", "float16"))
    parts = []
    for rank in range(2):
        with pretended(2, rank):
            decoder = load(directory, half, native_operators="off").decoder
        parts.append(dict(decoder.named_parameters()))
        mapped = {name for name, part in parts[-1].items() if lies_in(path, part)}
        assert {"embedding.local.weight", "norm.weight", "layers.1.post_norm.weight"} <= mapped
        for name in parts[-1].keys() - mapped:
            part = parts[-1][name]
            assert part.untyped_storage().nbytes() == part.nbytes
    embedding, output = ([part[name] for part in parts] for name in CUT)
    assert torch.equal(torch.cat(embedding), weights["model.embed_tokens.weight"])
    assert torch.equal(torch.cat(output, 1), weights["model.layers.0.self_attn.o_proj.weight"])


CUT = ("embedding.local.weight", "layers.0.output.local.weight")


def lies_in(path, parameter) -> bool:
    """Whether a parameter's memory is a mapping of this file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= parameter.data_ptr() < end:
            return line.endswith(str(path))
    return False


def greedy(**sampling) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, **sampling)
    return GenerateRequest(input_ids=PROMPT, sampling=params)


def test_a_rank_that_loses_the_others_computes_nothing_more(tiny_dir):
    """Row by row, as one rank alone would, it would send what nobody waits for."""
    with pretended(2, 0) as silent:
        model = load(tiny_dir)
        silent.num_calls = 0
        drive = Drive(model)
        drive.start("0", greedy())
        drive.tick()
        num_calls = silent.num_calls
    with pretended(2, 0, broken_after=num_calls + 2) as silent:
        # Loading agrees on the arguments in one call.
        drive = Drive(load(tiny_dir))
        for rid in ("0", "1", "2"):
            drive.start(rid, greedy())
        with pytest.raises(PhalanxDistError, match="a rank has"):
            for _ in range(20):
                drive.tick()
        assert silent.num_calls == num_calls + 3
        with pytest.raises(PhalanxDistError):
            drive.tick()
        assert silent.num_calls == num_calls + 3


def test_drawn_tokens_are_the_first_ranks_and_greedy_ones_need_no_asking(tiny_dir):
    with pretended(2, 1, first_rank=7):
        drive = Drive(load(tiny_dir))
        drawn = GenerateRequest(
            input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=8, ignore_eos=True)
        )
        [output] = drive.run(drawn)
        assert output.completions[0].token_ids == (7,) * 8
        [output] = drive.run(greedy())
        assert 7 not in output.completions[0].token_ids


def test_one_rank_alone_fails_only_the_request_whose_row_breaks(tiny):
    drive = Drive(tiny)
    drive.start("0", greedy())
    drive.start("1", greedy())
    drive.service._loop._requests["1"].state.scores = None
    drive.finish()
    assert len(drive.output("0").completions[0].token_ids) == 8
    assert isinstance(drive.error("1"), AttributeError)


class Compiled:
    """A compiler that is asked for grammars and refuses those named `bad`."""

    def __init__(self) -> None:
        self.kept: list[str] = []

    def compile(self, source: GrammarSource) -> str:
        if source.text == "bad":
            raise source.refusal("it was only a test")
        return source.text

    def keep(self, source: GrammarSource, grammar: str) -> None:
        self.kept.append(source.text)


def test_a_grammar_that_failed_on_one_rank_fails_on_all():
    answers = iter([[0, 0], [1, 2]])
    asked: list[list[int]] = []

    def least(values):
        asked.append(list(values))
        return next(answers)

    compiler = Compiled()
    queue = GrammarQueue(compiler, least)
    for rid, text in (("a", "one"), ("b", "two")):
        queue.add(Prompt(rid, GenerateRequest(prompt="x"), (5,)), GrammarSource("regex", text))
    queue._executor.submit(bool).result()
    assert list(queue.take(patient=False)) == []
    [(first, error), (second, grammar)] = queue.take(patient=False)
    queue.close()
    assert (first.rid, second.rid, grammar) == ("a", "b", "two")
    assert "could not be compiled on another rank" in str(error)
    assert compiler.kept == ["two"]
    assert asked == [[2, 2], [2, 2]]
