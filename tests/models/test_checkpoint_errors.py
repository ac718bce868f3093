"""Checkpoints that cannot be served: what is wrong is named, and where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from phalanx.errors import CheckpointError, ConfigurationError
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.models.causal_lm.entry import CausalLM
from tests.models.driver import load
from tests.models.references import fused


@pytest.fixture
def directory(tiny_dir, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "broken"))


def refused(directory, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory, **options)
    return str(caught.value)


def configure(directory, **changes) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_weights(directory, change) -> None:
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)


def test_missing_directory(tmp_path):
    message = refused(tmp_path / "nowhere")
    assert "nowhere" in message
    assert "does not exist" in message


def test_missing_config(directory):
    (directory / "config.json").unlink()
    assert "config.json" in refused(directory)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_unreadable_config(directory, text):
    (directory / "config.json").write_text(text)
    assert "config.json cannot be read" in refused(directory)


def test_missing_weights(directory):
    (directory / "model.safetensors").unlink()
    message = refused(directory)
    assert "model.safetensors does not exist" in message


@pytest.mark.parametrize("kept", [0, 5, 100, 2000, -1])
def test_truncated_weights(directory, kept):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    message = refused(directory)
    assert "model.safetensors is damaged or incomplete" in message
    with pytest.raises(CheckpointError, match="model.safetensors is damaged or incomplete"):
        CausalLM.serving(CausalLMArgs(directory))


def test_weights_are_looked_at_before_anything_is_loaded(directory):
    CausalLM.serving(CausalLMArgs(directory))
    path = directory / "model.safetensors"
    path.write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        CausalLM.serving(CausalLMArgs(directory))
    path.unlink()
    with pytest.raises(CheckpointError, match="model.safetensors does not exist"):
        CausalLM.serving(CausalLMArgs(directory))


def test_tensors_that_do_not_fit(directory):
    def change(weights):
        del weights["model.layers.0.self_attn.k_proj.weight"]
        del weights["model.norm.weight"]
        extra = weights["model.layers.1.mlp.up_proj.weight"].clone()
        weights["model.layers.7.mlp.up_proj.weight"] = extra
        weights["model.layers.1.mlp.down_proj.weight"] = weights[
            "model.embed_tokens.weight"
        ].clone()
        return weights

    change_weights(directory, change)
    message = refused(directory)
    missing, rest = message.split("; unexpected ")
    unexpected, misshapen = rest.split("; misshapen ")
    assert missing.endswith("missing model.norm.weight, model.layers.0.self_attn.k_proj.weight")
    assert unexpected == "model.layers.7.mlp.up_proj.weight"
    assert misshapen == "model.layers.1.mlp.down_proj.weight of (400, 32) instead of (32, 48)"


def test_many_missing_tensors_are_counted(directory):
    change_weights(directory, lambda weights: {"model.norm.weight": weights["model.norm.weight"]})
    message = refused(directory)
    assert "model.layers.0.self_attn.q_proj.weight" in message
    assert "qkv_proj" not in message
    assert "and 11 more; unexpected none; misshapen none" in message


def test_a_tensor_given_twice(directory):
    def change(weights):
        both = fused(weights)
        return {
            **weights,
            "model.layers.0.self_attn.qkv_proj.weight": next(
                both[name] for name in both if "layers.0.self_attn.qkv_proj" in name
            ),
        }

    change_weights(directory, change)
    assert "layers.0.self_attn" in refused(directory).split("unexpected ")[1]


def test_missing_head(directory):
    configure(directory, tie_word_embeddings=False)
    assert "missing lm_head.weight;" in refused(directory)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        '{"metadata": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"model.norm.weight": 3}}',
    ],
)
def test_bad_index(directory, index):
    (directory / "model.safetensors.index.json").write_text(index)
    assert "index.json is not an index of weights" in refused(directory)


def test_index_of_a_missing_file(directory):
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors does not exist" in refused(directory)


def test_index_of_too_few_files(directory):
    def change(weights):
        del weights["model.norm.weight"]
        return weights

    change_weights(directory, change)
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "missing model.norm.weight;" in refused(directory)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"architectures": ...}, "unnamed is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "'factor'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
    ],
)
def test_config_that_is_not_supported(directory, changes, named):
    configure(directory, **changes)
    assert named in refused(directory)


@pytest.mark.parametrize("value", ["</s>", [2, None], -1])
def test_bad_end_of_text(directory, value):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert "eos_token_id" in refused(directory)


def test_damaged_tokenizer(directory):
    (directory / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refused(directory)


def test_context_beyond_the_checkpoint(directory):
    with pytest.raises(ConfigurationError, match="context_length=257 exceeds the checkpoint's 256"):
        load(directory, context_length=257)
