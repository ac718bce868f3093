"""Bit-equal outputs whatever arrives when, as docs/rl-serving.md promises of the native operators."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from phalanx.device.operators import create_operators
from phalanx.models.causal_lm.scoring import score
from phalanx.schema.generate import GenerateRequest, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive, load

EXACT = {"native_operators": "required", "prefix_cache": False}
NUM_REQUESTS = 8

needs_native = pytest.mark.skipif(
    create_operators("auto", "cpu", torch.float32).name != "native",
    reason="no native operators can be built here",
)


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory) -> Path:
    """Heads that the native attention takes, and rows of logits that threads would share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40_000,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def requests() -> list[GenerateRequest]:
    chosen = random.Random(3)
    made = []
    for at in range(NUM_REQUESTS):
        prompt = tuple(
            chosen.randrange(3, 40_000) for _ in range(chosen.choice([2, 7, 33, 64, 65, 130]))
        )
        sampling = SamplingParams(
            max_new_tokens=12,
            sampling_seed=at,
            top_p=1.0 if at % 2 else 0.9,
            ignore_eos=True,
        )
        logprobs = LogprobOptions(prompt_start=0 if at % 3 else None, top_k=3)
        made.append(
            GenerateRequest(
                input_ids=prompt, sampling=sampling, logprobs=logprobs, detokenize=False
            )
        )
    return made


@needs_native
def test_outputs_are_bit_equal_whatever_arrives_when(llama_dir):
    wanted = requests()
    model = load(llama_dir, native_operators="required")
    alone = [Drive(model, pool_tokens=4096, **EXACT).run(one)[0] for one in wanted]
    for seed, step_tokens in enumerate((512, 4, 16, 33)):
        chosen = random.Random(seed)
        bounds = {"max_batch_size": 1 + 3 * seed, "max_step_tokens": step_tokens}
        drive = Drive(model, pool_tokens=4096, **bounds, **EXACT)
        order = chosen.sample(range(NUM_REQUESTS), NUM_REQUESTS)
        for at in order:
            drive.start(str(at), wanted[at])
            for _ in range(chosen.randrange(4)):
                drive.tick()
        drive.finish()
        assert [drive.output(str(at)) for at in range(NUM_REQUESTS)] == alone


def test_a_score_does_not_depend_on_the_rows_beside_it_nor_on_threads():
    logits = torch.randn(9, 49152, generator=torch.Generator().manual_seed(0)) * 4
    tokens, before = torch.arange(9), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rows = [score(logits[at : at + 1], tokens[at : at + 1], 3, ()) for at in range(9)]
            found += [
                (
                    torch.cat([one.values for one in rows]),
                    torch.cat([one.top_values for one in rows]),
                )
            ]
            whole = score(logits, tokens, 3, ())
            found += [(whole.values, whole.top_values)]
    finally:
        torch.set_num_threads(before)
    for values, top in found[1:]:
        assert torch.equal(values, found[0][0]) and torch.equal(top, found[0][1])
