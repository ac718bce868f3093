"""Small random models that transformers builds and saves, against transformers itself."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from phalanx.schema.generate import GenerateRequest, LogprobOptions
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import BFLOAT16, Drive, load
from tests.models.references import fused, log_probabilities

TOLERANCE = 1e-5
VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3(**changes):
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, **changes}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, rope_parameters=ROPE3, **sizes)
    )


def llama_with_biases():
    return llama3(attention_bias=True, num_key_value_heads=6)


def llama_with_linear_rope():
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, rope_parameters=rope, **sizes)
    )


def qwen2(**changes):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **sizes))


def qwen2_tied():
    return qwen2(tie_word_embeddings=True)


def qwen3(**changes):
    sizes = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=24, **sizes))


def qwen3_tied():
    return qwen3(tie_word_embeddings=True)


MODELS = [
    llama3,
    llama_with_biases,
    llama_with_linear_rope,
    qwen2,
    qwen2_tied,
    qwen3,
    qwen3_tied,
]


def built(make):
    """The model with every weight at random: norms and biases too, which start as ones and zeros."""
    torch.manual_seed(1)
    model = make().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
    return model


def prompts():
    generator = torch.Generator().manual_seed(3)
    lengths = (1, 19, 70)
    return [
        tuple(torch.randint(3, VOCABULARY, (length,), generator=generator).tolist())
        for length in lengths
    ]


def requests():
    return [
        GenerateRequest(
            input_ids=ids,
            sampling=SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True),
            logprobs=LogprobOptions(prompt_start=0, token_ids=tuple(range(VOCABULARY))),
            detokenize=False,
        )
        for ids in prompts()
    ]


def distribution(entries) -> torch.Tensor:
    """Every token's log-probability at every position, NaN where nothing is before it."""
    nothing = [(float("nan"), 0)] * VOCABULARY
    rows = [nothing if row is None else row for row in entries.selected]
    return torch.tensor([[value for value, _ in row] for row in rows])


def check(model, outputs, tolerance=TOLERANCE):
    for ids, output in zip(prompts(), outputs, strict=True):
        tokens = output.completions[0].token_ids
        assert len(tokens) == 12
        expected = log_probabilities(model, (*ids, *tokens))
        found = torch.cat(
            [distribution(output.prompt_logprobs), distribution(output.completions[0].logprobs)]
        )
        scored = expected[:, :VOCABULARY]
        torch.testing.assert_close(found, scored, rtol=0, atol=tolerance, equal_nan=True)
        assert expected[len(ids) :].argmax(dim=-1).tolist() == list(tokens)


@pytest.mark.parametrize("operators", ["auto", "off"])
@pytest.mark.parametrize("make", MODELS)
def test_every_token_of_every_position(tmp_path, make, operators):
    model = built(make)
    model.save_pretrained(tmp_path)
    drive = Drive(load(tmp_path, native_operators=operators), max_step_tokens=32, page_size=8)
    check(model, drive.run(*requests()))


@pytest.mark.parametrize("make", [llama3, qwen2_tied])
def test_sharded(tmp_path, make):
    model = built(make)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    check(model, Drive(load(tmp_path)).run(*requests()))


@pytest.mark.parametrize("make", [llama_with_biases, qwen2, qwen3])
def test_fused_layout(tmp_path, make):
    model = built(make)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        weights = fused({name: file.get_tensor(name) for name in file.keys()})
    assert any("qkv_proj" in name for name in weights)
    save_file(weights, tmp_path / "model.safetensors")
    check(model, Drive(load(tmp_path)).run(*requests()))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_bfloat16(tmp_path, make, stored):
    """Near float32 on the rounded weights; bf16's own rounding is transformers' neither."""
    built(make).to(torch.bfloat16).to(stored).save_pretrained(tmp_path)
    drive = Drive(load(tmp_path, BFLOAT16), BFLOAT16, max_step_tokens=32)
    model = reloaded(make, tmp_path)
    for ids, output in zip(prompts(), drive.run(*requests()), strict=True):
        assert len(output.completions[0].token_ids) == 12
        found = distribution(output.prompt_logprobs)
        difference = (found - log_probabilities(model, ids))[1:].abs()
        assert len(ids) == 1 or 0 < difference.mean() < 0.05


def test_float32_from_bfloat16_weights(tmp_path):
    built(qwen3).bfloat16().save_pretrained(tmp_path)
    check(reloaded(qwen3, tmp_path), Drive(load(tmp_path)).run(*requests()))


def reloaded(make, directory):
    """As transformers reads it back in float32, with its positions unrounded."""
    return type(make()).from_pretrained(directory, dtype=torch.float32).eval()
