"""Rotary tables against transformers' own, and what a checkpoint may say of them."""

from __future__ import annotations

import pytest
import torch
import transformers

from phalanx.errors import CheckpointError
from phalanx.layers.rotary import RopeParameters, RotaryEmbedding

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
KINDS = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    LLAMA3,
]


@pytest.mark.parametrize("parameters", KINDS, ids=lambda p: p["rope_type"])
def test_tables_equal_those_of_transformers(parameters):
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters=parameters
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.arange(1024)
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours = RotaryEmbedding(64, 1024, RopeParameters.from_config(config.to_dict()))
    our_cos, our_sin = ours(positions)
    assert torch.equal(our_cos, cos[0, :, :32]) and torch.equal(our_sin, sin[0, :, :32])


def test_positions_pick_rows_in_their_order():
    rotary = RotaryEmbedding(8, 16, RopeParameters())
    cos, sin = rotary(torch.tensor([3, 0, 3]))
    assert cos.shape == sin.shape == (3, 4)
    assert torch.equal(cos[0], cos[2]) and torch.equal(cos[1], torch.ones(4))


def test_old_and_new_configurations_say_the_same():
    new = RopeParameters.from_config({"rope_parameters": LLAMA3})
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = RopeParameters.from_config({"rope_theta": 500000.0, "rope_scaling": scaling})
    older = dict(scaling, type=scaling["rope_type"])
    del older["rope_type"]
    assert new == old == RopeParameters.from_config({"rope_theta": 5e5, "rope_scaling": older})
    assert RopeParameters.from_config({}) == RopeParameters()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(config, named):
    with pytest.raises(CheckpointError, match=named):
        RopeParameters.from_config(config)


def test_an_odd_head_size_is_refused():
    with pytest.raises(CheckpointError, match="head_dim=7"):
        RotaryEmbedding(7, 4, RopeParameters())
