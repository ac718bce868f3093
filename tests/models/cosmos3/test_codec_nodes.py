"""The nodes at both ends of a request: pixels to what is known of its video, latents to pixels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.errors import PhalanxDistError
from phalanx.models.cosmos3.codec_nodes import DecodeNode, EncodeNode
from phalanx.models.cosmos3.conditioning import fit_observation, image_frame
from phalanx.models.cosmos3.lockstep import Lockstep
from phalanx.models.cosmos3.row import DECODE_NODE, ENCODE_NODE, MediaRequest, Walk
from phalanx.models.cosmos3.vae.checkpoint import load_vae
from phalanx.models.cosmos3.vae.codec import WanVae
from phalanx.parallel.current import default_mesh
from phalanx.step.submodule import EngineInputs, NodeSubmodule, RequestInfo, StepRow
from tests.models.cosmos3.loops import Drive, Loop, model_of
from tests.models.cosmos3.stored import tensors
from tests.models.in_each_rank import pretended

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def vae(folders):
    return load_vae(folders["silu"], torch.device("cpu"), torch.float32)


def stepped(node: NodeSubmodule, walk: Walk, state: MediaRequest) -> None:
    """What the engine does with one row."""
    row = StepRow(RequestInfo("it", state), 1)
    inputs = [node.prepare_inputs(walk.value, row)]
    assert node.max_batch_size(walk.value) == 1
    prepared = node.preprocess(EngineInputs(walk.value, (row,), None, {}), inputs)
    node.postprocess(row, [node.forward(prepared)])


def test_an_image_becomes_the_clean_frame(vae):
    frame = image_frame(tensors("conditioning")["image"], 48, 64)
    loop = Loop("loop_i2v_karras")
    state = MediaRequest(replace(loop.inputs(), known=None, pixels=frame))
    assert state.next_work().node == ENCODE_NODE
    stepped(EncodeNode(vae, Lockstep(None)), Walk.ENCODE, state)
    begun = state.turn().media.vision
    assert (begun - tensors("loop_i2v_karras/io")["noise.vision"][0]).abs().max() < TOLERANCE


def test_an_observation_becomes_the_clean_frame_of_its_content(vae):
    seen = fit_observation(tensors("conditioning")["image"][None], 256)
    state = MediaRequest(replace(Loop("loop_policy").inputs(), known=None, pixels=seen.pixels))
    stepped(EncodeNode(vae, Lockstep(None)), Walk.ENCODE, state)
    begun = state.turn().media.vision
    assert begun.shape == (6, 3, *seen.content)
    assert (begun - tensors("loop_policy/io")["noise.vision"][0]).abs().max() < TOLERANCE


def finished(loop: Loop) -> MediaRequest:
    """A request whose latents are the last of a stored loop."""
    last = loop.num_steps - 1
    inputs = loop.inputs()
    latents = replace(inputs.noise, vision=loop.stored(last, "latents", "vision"))
    return MediaRequest(replace(inputs, noise=latents, decodes=True))


def test_latents_become_pixels(vae):
    state = finished(Loop("loop_t2v"))
    stepped(DecodeNode(vae, Lockstep(None)), Walk.DECODE, state)
    stored = tensors("loop_t2v/io")["out.video"].transpose(0, 1)
    assert (state.pixels - stored).abs().max() < TOLERANCE
    assert DECODE_NODE == Walk.DECODE.value


def test_what_another_rank_decodes_is_left_to_it():
    state = finished(Loop("loop_t2v"))
    stepped(DecodeNode(None, Lockstep(None)), Walk.DECODE, state)
    assert state.pixels is None


def test_steps_of_others_run_between_two_videos(folders):
    drive = Drive(model_of(folders["silu"]))
    first, second = drive.run(*(Loop("loop_t2v").inputs(decodes=True) for _ in range(2)))
    assert drive.batches == [2, 2, 2, 2, 2, 1, 1]
    assert torch.equal(first.pixels, second.pixels)


class Broken(WanVae):
    """Breaks on this rank only."""

    def encode(self, pixels, piece=None):
        raise RuntimeError("no memory")


def test_a_rank_that_cannot_encode_ends_the_replica(vae):
    frame = image_frame(tensors("conditioning")["image"], 48, 64)
    state = MediaRequest(replace(Loop("loop_i2v_karras").inputs(), known=None, pixels=frame))
    with pretended(2, 1):
        lockstep = Lockstep(default_mesh().group("world"))
        with pytest.raises(RuntimeError, match="no memory"):
            stepped(EncodeNode(Broken(vae.config), lockstep), Walk.ENCODE, state)
        with pytest.raises(PhalanxDistError, match="leaves the others waiting for it: no memory"):
            lockstep.check()


class Lost:
    """A decoder whose other ranks are gone."""

    def decode(self, latents):
        raise PhalanxDistError("rank 1 has ended")


def test_a_lost_rank_ends_the_replica(vae):
    with pretended(2, 0):
        lockstep = Lockstep(default_mesh().group("world"))
        node = DecodeNode(Lost(), lockstep)
        with pytest.raises(PhalanxDistError, match="rank 1 has ended"):
            stepped(node, Walk.DECODE, finished(Loop("loop_t2v")))
        with pytest.raises(PhalanxDistError, match="rank 1 has ended"):
            lockstep.check()
