"""One forward against what diffusers computed, tensor by tensor, and every step of its loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from phalanx.device.operators import create_operators
from phalanx.layers.linear import Linear
from phalanx.models.cosmos3.geometry import media_positions
from phalanx.models.cosmos3.media import MediaRow
from tests.models.cosmos3.loop_shapes import SHAPES
from tests.models.cosmos3.standing_in import (
    TOLERANCE,
    CausalText,
    Forward,
    JoinedText,
    TextMemory,
    errors,
    known_ids,
    known_row,
    loaded,
)
from tests.models.cosmos3.stored import document, tensors

FAMILIES = ("silu", "relu2")


class Kept(nn.Module):
    """A layer that keeps what it gave."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        self.result = self.layer.forward(x)
        return self.result


def traced(transformer, ids: Tensor, row: MediaRow, operators) -> dict[str, Tensor]:
    """What a forward passes through, by the names that it is stored under."""
    memory = TextMemory(operators)
    within = CausalText() if transformer.config.separate_text_keys else None
    rotary = transformer.rotary.line(torch.arange(len(ids)))
    found = {"cos_und": rotary[0], "sin_und": rotary[1]}
    x = transformer.embedding(ids)
    found["embed.und"] = x.clone()
    hidden = torch.zeros_like(x), x
    kept = {}
    for name, layers in (("und", transformer.text_layers), ("gen", transformer.media_layers)):
        kept[name] = layers[0].output = Kept(layers[0].output)
    for index, layer in enumerate(transformer.text_blocks()):
        hidden = layer.forward(hidden, rotary, memory, within)
        found[f"layer{index}.und"] = hidden[0] + hidden[1]
    transformer.last_text_layer.forward(hidden, rotary, memory)
    rotary = transformer.rotary(media_positions(transformer.config, row.shape, len(ids)))
    found |= {"cos_gen": rotary[0], "sin_gen": rotary[1]}
    x, attention = transformer.embed_media([row]), JoinedText(memory)
    found["embed.gen"] = x.clone()
    hidden = torch.zeros_like(x), x
    for index, layer in enumerate(transformer.media_blocks()):
        hidden = layer.forward(hidden, rotary, attention)
        found[f"layer{index}.gen"] = hidden[0] + hidden[1]
    found["final.gen"] = transformer.media_norm.add(*hidden)[0]
    return found | {f"attn0.{name}": one.result for name, one in kept.items()}


@pytest.mark.parametrize("native", ["off", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_forward(folders, family, native):
    operators = create_operators(native, "cpu", torch.float32)
    transformer = loaded(folders[family], operators=operators)
    got = traced(transformer, known_ids(family), known_row(family), operators)
    known = {
        name.removeprefix("mid."): x
        for name, x in tensors(f"{family}/io").items()
        if name.startswith("mid.")
    }
    # The text's last hidden value is read by nothing, and is not computed.
    del known["layer2.und"]
    assert got.keys() == known.keys()
    for name, x in known.items():
        if x.shape[1] == 2 * got[name].shape[1]:
            x = x[:, : got[name].shape[1]]  # both halves are the same
        torch.testing.assert_close(got[name], x, atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize("native", ["off", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_velocities_of_a_forward(folders, family, native):
    operators = create_operators(native, "cpu", torch.float32)
    transformer = loaded(folders[family], operators=operators)
    velocity = Forward.of(transformer, known_ids(family), known_row(family), operators).run()
    found = errors(velocity, family)
    assert found.keys() == {"vision", "sound", "action"}
    assert max(found.values()) < TOLERANCE / 4
    assert not velocity.vision[:, 0].any()
    assert not velocity.actions[2].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_alone(folders, family):
    full = known_row(family)
    shape = replace(full.shape, sound_frames=0, action_rows=0, clean_rows=frozenset())
    row = MediaRow(shape, 637, full.vision)
    velocity = Forward.of(loaded(folders[family]), known_ids(family), row).run()
    known = tensors(f"{family}/io")["out.vision_only"]
    torch.testing.assert_close(velocity.vision[None], known, atol=TOLERANCE, rtol=0)
    assert velocity.sound is None
    assert velocity.actions is None


def row_of(name: str, step: int) -> MediaRow:
    """What the network was given at a step of a stored loop."""
    stored, shape = tensors(f"{name}/io"), SHAPES[name]
    of_step = f"step{step}.latents_in"
    return MediaRow(
        shape,
        int(stored[f"step{step}.timestep"]),
        stored[f"{of_step}.vision"][0],
        stored.get(f"{of_step}.sound"),
        stored[f"{of_step}.action"] if f"{of_step}.action" in stored else given_actions(name),
        domain=8 if shape.action_rows else 0,
    )


def given_actions(name: str) -> Tensor | None:
    """The actions that no solver steps, where a loop has any."""
    return tensors(f"{name}/io").get("noise.action")


@pytest.mark.parametrize("name", SHAPES)
def test_every_network_output_of_every_loop(folders, name):
    stored, transformer = tensors(f"{name}/io"), loaded(folders["silu"])
    steps = len(stored["sigmas"]) - 1
    num_outputs = 0
    for step in range(steps):
        row = row_of(name, step)
        for branch in ("cond", "uncond"):
            if f"step{step}.{branch}.vision" not in stored:
                continue
            velocity = Forward.of(transformer, stored[f"{branch}_ids"], row).run()
            outputs = {
                "vision": velocity.vision[None],
                "sound": velocity.sound,
                "action": velocity.actions,
            }
            for kind, x in outputs.items():
                known = stored.get(f"step{step}.{branch}.{kind}")
                assert (known is None) == (x is None), kind
                if x is not None:
                    torch.testing.assert_close(x, known, atol=TOLERANCE, rtol=0)
                    num_outputs += 1
    kinds = 1 + bool(SHAPES[name].sound_frames) + bool(SHAPES[name].action_rows)
    branches = 1 if name == "loop_forward_dynamics" else 2
    assert num_outputs == steps * branches * kinds


def test_rows_and_branches_share_a_pass(folders):
    """Tokens of several requests, one after another, are what each is alone."""
    transformer = loaded(folders["silu"])
    names = ("loop_policy", "loop_t2v_sound", "loop_t2i", "loop_policy_state")
    rows = [row_of(name, 1) for name in names]
    alone = [transformer.embed_media([row]) for row in rows]
    together = transformer.embed_media(rows)
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=0)
    hidden = torch.randn(len(together), 48, generator=torch.Generator().manual_seed(0))
    at = 0
    for row, velocity in zip(rows, transformer.velocities(hidden, rows), strict=True):
        own = transformer.velocities(hidden[at : at + row.shape.num_tokens], [row])[0]
        for x, y in zip(vars(velocity).values(), vars(own).values(), strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, atol=1e-6, rtol=0)
        at += row.shape.num_tokens


def test_what_is_all_given_has_no_velocity(folders):
    transformer = loaded(folders["silu"])
    row = row_of("loop_forward_dynamics", 0)
    still = replace(row, shape=replace(row.shape, clean_frames=frozenset(range(3))))
    hidden = torch.ones(row.shape.num_tokens, 48)
    (velocity,) = transformer.velocities(hidden, [still])
    assert not velocity.vision.any()
    assert not velocity.actions.any()


def test_frames_on_both_sides_of_a_given_one_are_drawn(folders):
    transformer = loaded(folders["silu"])
    row = row_of("loop_t2v", 0)
    drawn = replace(row.shape, clean_frames=frozenset({1}))
    hidden = torch.randn(12, 48, generator=torch.Generator().manual_seed(0))
    (every,) = transformer.velocities(hidden, [row])
    (some,) = transformer.velocities(hidden, [replace(row, shape=drawn)])
    assert every.vision.abs().min() > 0
    assert not some.vision[:, 1].any()
    for frame in (0, 2):
        torch.testing.assert_close(some.vision[:, frame], every.vision[:, frame], atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_bfloat16_come_close(folders, family):
    transformer = loaded(folders[family], torch.bfloat16)
    assert transformer.media.time.first.bias.dtype == torch.float32
    velocity = Forward.of(transformer, known_ids(family), known_row(family)).run()
    known = tensors(f"{family}/io")
    outputs = {"vision": velocity.vision[None], "sound": velocity.sound, "action": velocity.actions}
    for name, x in outputs.items():
        assert x.dtype == torch.float32
        off = (x - known[f"out.{name}"]).abs()
        assert off.max() < 5e-2
        assert off.mean() < 1.5e-2


def test_every_linear_layer_is_in_its_fastest_form(folders):
    transformer = loaded(folders["silu"])
    linears = [one for one in transformer.modules() if isinstance(one, Linear)]
    # Two text layers of four, one of one, three media layers of four, and six in and out.
    assert len(linears) == 2 * 4 + 1 + 3 * 4 + 6
    assert all(one.weight.is_meta and one.packed_bytes for one in linears)


def test_nothing_that_is_not_needed_is_held(folders):
    """The checkpoint's numbers less the head, the text's own norm, and its dead last layer."""
    transformer = loaded(folders["silu"])
    linears = {one for one in transformer.modules() if isinstance(one, Linear)}
    held = sum(one.dense_weight().numel() for one in linears)
    held += sum(x.numel() for x in transformer.parameters() if not x.is_meta)
    stored = sum(x.numel() for x in tensors("silu/model").values())
    config = document("silu/config")
    width, inner, q = config["hidden_size"], config["intermediate_size"], 4 * 16
    dead = 96 * width + width + 2 * q * width + 3 * inner * width + width + 16
    assert held == stored - dead


def test_a_time_is_embedded_once(folders):
    transformer = loaded(folders["silu"])
    time = transformer.media.time
    first = time.forward(637)
    assert time.forward(637) is first
    assert not torch.equal(time.forward(638), first)
    for timestep in range(300):
        time.forward(timestep)
    assert time.forward(637) is not first
    assert torch.equal(time.forward(637), first)
