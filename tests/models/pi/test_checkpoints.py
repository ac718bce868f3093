"""Checkpoints of LeRobot and openpi, and what is said of those that do not fit."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.engine_config import DeviceConfig, EngineConfig, RuntimeConfig, use_engine_config
from phalanx.errors import CheckpointError, ConfigurationError
from phalanx.models.pi.building import LoadedPolicy, load_policy
from phalanx.models.pi.names import EMBEDDING, LM_HEAD
from phalanx.models.pi0.entry import PI0
from phalanx.models.pi0.main_pi0 import PI0Args, PI0Config
from phalanx.models.pi05.entry import PI05
from phalanx.models.pi05.main_pi05 import PI05Args, PI05Config
from tests.models.pi.stored import FLOAT32, HEADS, checkpoint, close, loaded, request, run

NAME = "pi05_micro_f32"
CONFIG = PI05Config(vision_num_heads=HEADS)
SMALL = PI05Config(
    vision_width=24,
    vision_inner_width=32,
    vision_num_layers=1,
    vision_num_heads=2,
    image_size=28,
    text_width=16,
    text_inner_width=32,
    expert_width=8,
    expert_inner_width=16,
    num_layers=2,
    num_heads=2,
    head_dim=8,
    vocab_size=64,
    chunk_size=4,
    max_action_dim=6,
    tokenizer_max_length=12,
    num_steps=2,
)


def load_from(directory, engine=FLOAT32, **changed) -> LoadedPolicy:
    args = PI05Args(directory, **{"config": CONFIG, "native_operators": "off", **changed})
    with use_engine_config(engine):
        return load_policy(PI05, args)


def weights() -> dict[str, torch.Tensor]:
    return load_file(checkpoint(NAME) / "model.safetensors")


@pytest.fixture
def directory(tmp_path):
    """A copy of the fixture's configuration, for other weights."""
    shutil.copy(checkpoint(NAME) / "config.json", tmp_path)
    return tmp_path


def write(directory, tensors) -> None:
    save_file(tensors, directory / "model.safetensors")


def same(policy: LoadedPolicy) -> None:
    for found, expected in zip(
        run(policy, request(NAME)).finish(), run(loaded(NAME), request(NAME)).finish(), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("config", ["lerobot", "openpi", "none"])
def test_openpi_writes_no_prefix_and_only_the_head(directory, config):
    tensors = {name.removeprefix("model."): tensor for name, tensor in weights().items()}
    tensors[LM_HEAD] = tensors.pop(EMBEDDING)
    write(directory, tensors)
    given = CONFIG
    if config != "lerobot":
        given = PI05Config(vision_num_heads=HEADS, chunk_size=10)
        (directory / "config.json").unlink()
    if config == "openpi":
        sizes = {"action_dim": 32, "action_horizon": 10, "paligemma_variant": "gemma_2b"}
        (directory / "config.json").write_text(json.dumps(sizes))
        given = CONFIG
    same(load_from(directory, config=given))


def test_a_tied_embedding_takes_new_weights_by_both_of_its_names(directory):
    tensors = weights()
    old = tensors.pop(f"model.{EMBEDDING}")
    write(directory, {**tensors, f"model.{LM_HEAD}": old})
    policy = load_from(directory)
    for name in (EMBEDDING, LM_HEAD):
        policy.weights.check_weight(name, 2 * old)
        policy.weights.replace({name: 2 * old})
        assert torch.equal(policy.model.language.embedding, 2 * old)
        policy.weights.replace({name: old})
    same(policy)


def test_weights_over_several_files(directory):
    names = sorted(tensors := weights())
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, directory / file)
    where = {name: file for file, own in parts.items() for name in own}
    index = json.dumps({"weight_map": where})
    (directory / "model.safetensors.index.json").write_text(index)
    same(load_from(directory))


def test_what_does_not_fit_is_named(directory):
    tensors = weights()
    missing = "model.time_mlp_in.bias"
    del tensors[missing]
    tensors["model.new_part.weight"] = torch.zeros(2)
    tensors["model.time_mlp_out.weight"] = torch.zeros(32, 31)
    write(directory, tensors)
    with pytest.raises(CheckpointError) as refused:
        load_from(directory)
    for said in (
        "missing time_mlp_in.bias",
        "unexpected new_part.weight",
        "time_mlp_out.weight of (32, 31) instead of (32, 32)",
        "weight_strict=False",
    ):
        assert said in str(refused.value)


def test_what_does_not_fit_is_logged_where_that_is_allowed(directory, caplog):
    tensors = weights()
    tensors["model.new_part.weight"] = torch.zeros(2)
    write(directory, tensors)
    with caplog.at_level(logging.WARNING):
        same(load_from(directory, weight_strict=False))
    assert "unexpected new_part.weight" in caplog.text


def renamed(name: str) -> str | None:
    return None if name == "step" else name.replace("net/", "model.")


@pytest.mark.parametrize(
    ("extra", "remap"), [({"step": torch.zeros(1)}, renamed), ({}, {"net/": "model."})]
)
def test_weight_remap_renames_and_drops(directory, extra, remap):
    tensors = {name.replace("model.", "net/", 1): one for name, one in weights().items()}
    write(directory, {**tensors, **extra})
    with pytest.raises(CheckpointError, match="weight_remap"):
        load_from(directory)
    same(load_from(directory, weight_remap=remap))


def test_names_that_are_made_equal_are_refused(directory):
    with pytest.raises(CheckpointError, match="keep names apart"):
        load_from(checkpoint(NAME), weight_remap=lambda name: "model.one")


def test_the_number_of_heads_has_to_be_told():
    with pytest.raises(CheckpointError, match="vision_num_heads"):
        load_from(checkpoint(NAME), config=None)
    with pytest.raises(ConfigurationError, match="does not divide"):
        load_from(checkpoint(NAME), config=PI05Config(vision_num_heads=5))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({"expert_width": 48}, "expert_width=48"), ({"vocab_size": 299}, "tensors have 300")],
)
def test_sizes_that_contradict_the_tensors_are_refused(sizes, said):
    with pytest.raises(CheckpointError, match=said):
        load_from(checkpoint(NAME), config=PI05Config(vision_num_heads=HEADS, **sizes))


def test_a_configuration_that_contradicts_the_tensors_is_refused(directory):
    write(directory, weights())
    stored = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**stored, "image_resolution": [42, 42]}))
    with pytest.raises(CheckpointError, match="image_size=42"):
        load_from(directory)


def test_directories_that_are_none(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_from(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        load_from(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match="damaged"):
        load_from(tmp_path)


def test_pi0_has_no_images_of_cameras_that_are_always_empty():
    assert loaded("pi0_tiny_f32").model.geometry.num_cameras == 2
    assert loaded(NAME).model.geometry.num_cameras == 3


def test_a_number_of_images_decides_how_many_cameras_there_are():
    shapes = ((360, 360, 3), (360, 360, 3))
    policy = load_from(checkpoint(NAME), inputs_image_shape=shapes)
    assert policy.model.geometry.num_cameras == 2
    for wrong in (((360, 360, 4),), ()):
        with pytest.raises(ConfigurationError, match="inputs_image_shape"):
            PI05Args(inputs_image_shape=wrong)


def test_without_a_checkpoint_weights_are_random_and_the_seed_s():
    def made(seed):
        engine = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(seed=seed))
        return load_from(None, engine=engine, config=SMALL).model.state_dict()

    one, again, other = made(1), made(1), made(2)
    name = "expert.action_in.bias"
    assert torch.equal(one[name], again[name]) and not torch.equal(one[name], other[name])
    with use_engine_config(FLOAT32):
        args = PI0Args(config=PI0Config(**SMALL.given()))
        assert load_policy(PI0, args).model.geometry.chunk_size == 4


def test_the_published_sizes_are_the_default():
    from phalanx.models.pi.geometry import resolve_geometry

    geometry = resolve_geometry(PI05.published, PI05Config(), {}, None)
    assert (geometry.image_tokens, geometry.max_prefix) == (256, 968)
    assert geometry.expert_inner_width == 4096


@pytest.mark.parametrize("field", ["num_layers", "min_period"])
@pytest.mark.parametrize("value", [0, -1, True, "3"])
def test_sizes_are_positive_numbers(field, value):
    with pytest.raises(ConfigurationError, match=f"PI05Config.{field}"):
        PI05Config(**{field: value})


def test_bfloat16_rounds_what_a_cast_model_rounds():
    """Norms, projections of actions and the vision tower stay; frequencies are rounded too."""
    engine = EngineConfig(device=DeviceConfig("cpu", "bfloat16"))
    policy = load_from(checkpoint(NAME), engine=engine)
    model = policy.model
    assert model.language.embedding.dtype == torch.bfloat16
    assert model.eye.tower.positions.dtype == torch.float32
    assert model.expert.norm.dense.dense_weight().dtype == torch.float32
    assert model.expert.action_in.dense_weight().dtype == torch.float32
    frequencies = (1 / 10000 ** (torch.arange(0, 16, 2) / 16)).bfloat16().float()
    angles = torch.arange(model.max_tokens)[:, None] * frequencies
    assert torch.equal(model.rotary.cos, angles.cos().bfloat16().float())
    for found, expected in zip(
        run(policy, request(NAME)).finish(), run(loaded(NAME), request(NAME)).finish(), strict=True
    ):
        assert found.dtype == torch.float32
        close(found, expected, 0.03)
