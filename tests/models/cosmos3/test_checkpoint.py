"""The transformer of a checkpoint: in one file or several, and told by name what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.device.operators import create_operators
from phalanx.errors import CheckpointError
from phalanx.layers.checkpoint import Checkpoint, TensorNames
from phalanx.layers.linear import Linear
from phalanx.layers.weight_slots import replicated
from phalanx.models.cosmos3.checkpoint import STEM
from phalanx.models.cosmos3.loading import load_transformer
from phalanx.parallel.ranks import Ranks
from tests.models.cosmos3.standing_in import (
    CPU,
    TOLERANCE,
    Forward,
    errors,
    known_ids,
    known_row,
    loaded,
    with_config,
)
from tests.models.cosmos3.stored import checkpoint


def weights_file(directory: Path) -> Path:
    return directory / "transformer" / f"{STEM}.safetensors"


def changed(directory: Path, family: str = "silu", drop=(), **new: torch.Tensor) -> Path:
    """A checkpoint without some tensors, and with some others."""
    path = weights_file(checkpoint(directory, family))
    tensors = {name: x for name, x in load_file(path).items() if name not in drop}
    path.unlink()
    save_file(tensors | new, path)
    return directory


def error_of(directory: Path) -> float:
    return max(errors(Forward.of(loaded(directory), known_ids(), known_row()).run()).values())


def test_several_files_by_an_index(tmp_path):
    path = weights_file(checkpoint(tmp_path))
    tensors = load_file(path)
    path.unlink()
    places = {}
    for part in (1, 2):
        name = f"{STEM}-0000{part}-of-00002.safetensors"
        some = {
            one: x
            for index, (one, x) in enumerate(sorted(tensors.items()))
            if index % 2 + 1 == part
        }
        save_file(some, path.with_name(name))
        places |= dict.fromkeys(some, name)
    index = path.with_name(f"{STEM}.safetensors.index.json")
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    assert error_of(tmp_path) < TOLERANCE
    path.with_name(f"{STEM}-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002.safetensors does not exist"):
        loaded(tmp_path)


def test_what_nothing_depends_on_may_be_there_or_not(tmp_path):
    dead = [
        "lm_head.weight",
        "norm.weight",
        "layers.2.post_attention_layernorm.weight",
        *(f"layers.2.self_attn.{part}.weight" for part in ("to_q", "to_out", "norm_q")),
        *(f"layers.2.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    ]
    assert error_of(changed(tmp_path, drop=dead)) < TOLERANCE


def test_what_nothing_depends_on_in_the_relu2_family(tmp_path):
    dead = [
        f"layers.2.self_attn.{part}.{kind}"
        for part in ("to_q", "to_out")
        for kind in ("weight", "bias")
    ]
    dead += [f"layers.2.mlp.{part}_proj.weight" for part in ("up", "down")]
    transformer = loaded(changed(tmp_path, "relu2", drop=dead))
    velocity = Forward.of(transformer, known_ids("relu2"), known_row("relu2")).run()
    assert max(errors(velocity, "relu2").values()) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight",
        "norm_moe_gen.weight",
        "time_embedder.linear_1.bias",
        "action_proj_in.bias.weight",
        "audio_modality_embed",
        "layers.0.self_attn.norm_added_k.weight",
        "layers.1.self_attn.to_v.weight",
        "layers.1.mlp_moe_gen.gate_proj.weight",
        "layers.2.self_attn.norm_k.weight",
        "layers.2.self_attn.to_k.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    with pytest.raises(CheckpointError) as caught:
        loaded(changed(tmp_path, drop=[name]))
    assert f"missing {name}; unexpected none; misshapen none" in str(caught.value)
    assert str(tmp_path / "transformer") in str(caught.value)


def test_unexpected_and_misshapen_tensors_are_named_all_at_once(tmp_path):
    changed(
        tmp_path,
        drop=["proj_in.bias"],
        **{
            "layers.3.input_layernorm.weight": torch.ones(48),
            "proj_out.bias": torch.ones(25),
            "embed_tokens.weight": torch.ones(96, 48, dtype=torch.int8),
        },
    )
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path)
    said = str(caught.value)
    assert "missing proj_in.bias" in said
    assert "unexpected layers.3.input_layernorm.weight" in said
    assert "proj_out.bias of (25,) instead of (24,)" in said
    assert "embed_tokens.weight in I8 instead of floats" in said


def test_sizes_that_are_not_those_of_the_tensors(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"audio_proj_in.weight of \(48, 5\) instead of \(40, 5\)"
    ):
        loaded(with_config(tmp_path, hidden_size=40))


def test_a_policy_without_sound_needs_no_tensors_of_it(tmp_path):
    with_config(tmp_path, sound_gen=False)
    with pytest.raises(CheckpointError, match="unexpected .*audio_proj_in.bias"):
        loaded(tmp_path)
    path = weights_file(tmp_path)
    tensors = {name: x for name, x in load_file(path).items() if not name.startswith("audio_")}
    path.unlink()
    save_file(tensors, path)
    assert loaded(tmp_path).media.sound is None


def test_weights_of_another_precision_are_cast(tmp_path):
    path = weights_file(checkpoint(tmp_path))
    tensors = {name: x.bfloat16() for name, x in load_file(path).items()}
    path.unlink()
    save_file(tensors, path)
    transformer = loaded(tmp_path)
    assert transformer.media.time.first.bias.dtype == torch.float32
    assert transformer.media_norm.weight.dtype == torch.float32


def test_damaged_and_absent_files(tmp_path):
    with pytest.raises(CheckpointError, match="checkpoint directory .*nowhere' does not exist"):
        loaded(tmp_path / "nowhere")
    with pytest.raises(
        CheckpointError, match=r"config.json does not exist; give a directory of diff"
    ):
        loaded(tmp_path)
    path = weights_file(checkpoint(tmp_path))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        loaded(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{STEM}.safetensors does not exist"):
        loaded(tmp_path)
    (tmp_path / "transformer" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        loaded(tmp_path)


def test_an_impossible_size_names_its_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json: num_key_value_heads=0 .* 1 or more"):
        loaded(with_config(tmp_path, num_key_value_heads=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_ends_with_the_fastest_form(folders, dtype):
    operators = create_operators("auto", "cpu", dtype)
    transformer = load_transformer(folders["silu"], operators, CPU, dtype, Ranks.alone(CPU))
    assert transformer.media_layers[0].qkv.packed_bytes
    velocity = Forward.of(transformer, known_ids(), known_row(), operators).run()
    assert max(errors(velocity).values()) < (TOLERANCE if dtype == torch.float32 else 5e-2)


def test_tensors_that_are_unknown_may_be_left_out(tmp_path, caplog):
    directory = changed(tmp_path, **{"reasoner.weight": torch.zeros(2)})
    operators = create_operators("off", "cpu", torch.float32)
    given = (directory, operators, CPU, torch.float32, Ranks.alone(CPU))
    with pytest.raises(CheckpointError, match="unexpected reasoner.weight"):
        load_transformer(*given)
    load_transformer(*given, strict=False)
    assert "1 tensors are not loaded: reasoner.weight" in caplog.text


def test_tensors_that_are_missing_are_never_left_out(tmp_path):
    directory = changed(tmp_path, drop=("proj_in.bias",))
    operators = create_operators("off", "cpu", torch.float32)
    with pytest.raises(CheckpointError, match="missing proj_in.bias"):
        load_transformer(directory, operators, CPU, torch.float32, Ranks.alone(CPU), strict=False)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are Linux's")
def test_no_file_stays_mapped_once_its_matrices_are_packed(tmp_path):
    transformer = loaded(checkpoint(tmp_path))
    assert all(one.weight.is_meta for one in transformer.modules() if isinstance(one, Linear))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps are Linux's")
@pytest.mark.parametrize("once", [True, False])
def test_a_file_is_closed_behind_its_last_tensor_where_each_is_read_once(tmp_path, once):
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, file in enumerate(files):
        save_file({f"{number}.{part}": torch.ones(2, 3) for part in "ab"}, file)
    owners = [torch.nn.Linear(3, 2, bias=False) for _ in range(4)]
    names = ("0.a", "0.b", "1.a", "1.b")
    targets = {name: replicated(owner, "weight") for name, owner in zip(names, owners, strict=True)}
    mapped = []
    with Checkpoint(files) as opened:
        for _, read in opened.fitting(targets, TensorNames(tmp_path, "any"), once=once):
            assert read().sum() == 6
            maps = Path("/proc/self/maps").read_text()
            mapped.append([str(file) in maps for file in files])
    assert mapped[1] == [not once, mapped[0][1]]
    assert mapped[3] == [not once, not once]
