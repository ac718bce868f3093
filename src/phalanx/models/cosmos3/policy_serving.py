"""Between robots and the plugin `cosmos3_policy`: one camera's picture and an instruction become a
request, its normalized actions the robot's own.

An observation may also ask what given actions would lead to (mode forward_dynamics, input
`actions`), or which actions a clip shows (inverse_dynamics, input `video`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.errors import CheckpointError, InvalidRequestError
from phalanx.models.cosmos3.action_validation import FORWARD, INVERSE
from phalanx.models.cosmos3.args import Cosmos3PolicyArgs
from phalanx.models.cosmos3.checkpoint import read_config
from phalanx.models.cosmos3.conditioning import fit_observation, frames_of
from phalanx.models.cosmos3.geometry import TEMPORAL_STRIDE
from phalanx.models.cosmos3.policy_settings import (
    ActionParameters,
    PolicySettings,
    action_parameters,
)
from phalanx.models.cosmos3.prompt import Format, action_prompt, plain_action_prompt
from phalanx.models.cosmos3.request import Cosmos3Action, Cosmos3ActionRequest
from phalanx.models.cosmos3.texts import Texts
from phalanx.processing.policy.camera_names import short_name
from phalanx.schema.observation import Actions, Observation, PolicyInfo

POLICY = "cosmos3_policy"
CAMERA = "image"
ACTIONS, VIDEO, LATENTS = "actions", "video", "video_latents"
_INPUTS = {FORWARD: ACTIONS, INVERSE: VIDEO}


class Cosmos3PolicyServing:
    """A `PolicyAdapter`; the weights are not read."""

    def __init__(self, args: Cosmos3PolicyArgs, settings: PolicySettings) -> None:
        """Raises `CheckpointError` naming what the checkpoint lacks or does not fit."""
        directory = Path(args.checkpoint_dir)
        config = read_config(directory)
        if not config.action_gen:
            raise CheckpointError(f"{directory} has no actions; serve it by `plugin: cosmos3`")
        if (
            settings.width > config.action_dim
            or settings.domain_id >= config.num_embodiment_domains
        ):
            raise CheckpointError(
                f"{directory} has actions of up to {config.action_dim} numbers and "
                f"{config.num_embodiment_domains} domains; adapter.args ask for {settings.width} "
                f"numbers of domain {settings.domain_id}"
            )
        self._settings = settings
        self._action_dim = config.action_dim
        self._texts = Texts(directory, settings.tokenizer_dir)
        self.info = PolicyInfo(
            policy=POLICY,
            cameras=(settings.image_name or CAMERA,),
            state_dim=settings.state_dim,
            action_dim=settings.width,
            horizon=settings.action_chunk,
        )

    info: PolicyInfo

    def request(self, observation: Observation) -> Cosmos3ActionRequest:
        settings, asked = self._settings, action_parameters(observation, POLICY)
        if observation.num_rows > 1:
            raise InvalidRequestError(
                f"there are {observation.num_rows} observations in one request; send one each: "
                "those that are there at the same time are computed together",
                field="instructions",
            )
        _check_inputs(observation, asked)
        frames = settings.action_chunk + 1
        seen = fit_observation(self._frames(observation, asked), settings.resolution_tier)
        form = Format(frames, settings.fps, *seen.canvas)
        text_ids, text_mask = self._texts.tensors(self._prompt(observation, form), form)
        neg_ids, neg_mask = self._texts.tensors(settings.negative_prompt, form)
        guidance = asked.guidance_scale
        return Cosmos3ActionRequest(
            text_ids=text_ids,
            text_mask=text_mask,
            neg_text_ids=neg_ids,
            neg_text_mask=neg_mask,
            video_shape=((frames - 1) // TEMPORAL_STRIDE + 1, *seen.content),
            mode=asked.mode,
            domain_id=settings.domain_id,
            action_chunk=settings.action_chunk,
            raw_action_dim=settings.width,
            action_dim=self._action_dim,
            cond_video_pixels=seen.pixels[None],
            cond_action=self._given_actions(observation, asked),
            fps=settings.fps,
            num_inference_steps=settings.num_inference_steps
            if asked.num_steps is None
            else asked.num_steps,
            guidance_scale=settings.guidance_scale if guidance is None else guidance,
            seed=Cosmos3ActionRequest.seed if asked.seed is None else asked.seed,
            state=self._state(observation, asked),
            guidance_interval=settings.guidance_interval,
            flow_shift=settings.flow_shift,
        )

    def actions(self, output: Cosmos3Action, observation: Observation) -> Actions:
        """The robot's own actions; of forward_dynamics none. What is decoded comes as `video`, uint8
        (frames, height, width, 3); latents of forward_dynamics as `video_latents`.
        """
        outputs: dict[str, NDArray[np.generic]] = {}
        if output.pixels is not None:
            levels = output.pixels[0].float().mul(255).round().clamp(0, 255).byte()
            outputs[VIDEO] = levels.permute(1, 2, 3, 0).contiguous().cpu().numpy()
        elif output.action is None:
            outputs[LATENTS] = output.video[0].float().cpu().numpy()
        if output.action is None:
            values = np.zeros((0, self.info.action_dim), np.float32)
        else:
            own = _scaled(output.action[0].float().cpu(), self._settings.action_range, back=True)
            values = own[: observation.horizon].contiguous().numpy()
        return Actions(values[None] if observation.batched else values, outputs)

    def _prompt(self, observation: Observation, form: Format) -> str:
        viewpoint = None if self._settings.viewpoint == "none" else self._settings.viewpoint
        words = action_prompt if self._settings.prompt_style == "json" else plain_action_prompt
        return words(observation.instructions[0], form, viewpoint)

    def _frames(self, observation: Observation, asked: ActionParameters) -> Tensor:
        """uint8 [F, 3, H, W]: the clip, or the camera's one picture."""
        if asked.mode == INVERSE:
            clip = _of_the_row(observation, VIDEO, 4)
            wanted = self._settings.action_chunk + 1
            if (
                clip.dtype != np.uint8
                or clip.ndim != 4
                or clip.shape[-1] != 3
                or len(clip) < wanted
            ):
                raise InvalidRequestError(
                    f"video is {clip.dtype} of shape {clip.shape}; give uint8 (frames, height, width, "
                    f"3) of {wanted} frames",
                    field=VIDEO,
                )
            # What is behind the last whole latent has none.
            kept = frames_of(range(self._settings.action_chunk // TEMPORAL_STRIDE + 1))
            return torch.from_numpy(np.array(clip[:kept])).permute(0, 3, 1, 2)
        image = np.array(self._image(observation))
        if image.shape[-1] != 3:
            raise InvalidRequestError(
                f"the image has {image.shape[-1]} channels; this policy takes 3", field="images"
            )
        return torch.from_numpy(image)[None].permute(0, 3, 1, 2)

    def _image(self, observation: Observation) -> NDArray[np.uint8]:
        name = self._settings.image_name
        images = {short_name(key): image for key, image in observation.images.items()}
        if name is None and len(images) == 1:
            (image,) = images.values()
        elif name is not None and short_name(name) in images:
            image = images[short_name(name)]
        else:
            wanted = "one image" if name is None else f"the image {name!r}"
            raise InvalidRequestError(
                f"there are images {', '.join(map(repr, images)) or 'of no camera'}; this policy "
                f"takes {wanted}: send it, or name the robot's camera by image_name of the server's "
                "adapter.args",
                field="images",
            )
        return image[0] if observation.batched else image

    def _state(self, observation: Observation, asked: ActionParameters) -> Tensor | None:
        width = self._settings.state_dim
        if width is None or asked.mode in (FORWARD, INVERSE):
            return None
        state = observation.state
        if state is None or state.shape[-1] != width:
            given = (
                "there is no state" if state is None else f"the state has {state.shape[-1]} numbers"
            )
            raise InvalidRequestError(f"{given}; this policy takes {width}", field="state")
        values = torch.from_numpy(np.array(state).reshape(1, width))
        return _scaled(values, self._settings.state_range, back=False)

    def _given_actions(self, observation: Observation, asked: ActionParameters) -> Tensor | None:
        if asked.mode != FORWARD:
            return None
        given = _of_the_row(observation, ACTIONS, 2)
        if given.dtype.kind not in "fiu":
            raise InvalidRequestError(f"actions are {given.dtype}; give numbers", field=ACTIONS)
        width = self._settings.width
        if given.ndim != 2 or given.shape[1] != width or not len(given):
            raise InvalidRequestError(
                f"actions have shape {given.shape}; give (1 to {self._settings.action_chunk}, {width})",
                field=ACTIONS,
            )
        kept = torch.from_numpy(given[: self._settings.action_chunk].astype(np.float32))
        return _scaled(kept, self._settings.action_range, back=False)[None]


def _of_the_row(observation: Observation, name: str, num_dims: int) -> NDArray[np.generic]:
    """An input of `num_dims` dimensions; of a batch that of its one row."""
    given = np.asarray(observation.inputs[name])
    has_row = observation.batched and given.ndim == num_dims + 1 and len(given) == 1
    return given[0] if has_row else given


def _check_inputs(observation: Observation, asked: ActionParameters) -> None:
    wanted = _INPUTS.get(asked.mode)
    for name in observation.inputs:
        if name != wanted:
            raise InvalidRequestError(
                f"there is no input {name!r} in mode {asked.mode!r}; it takes "
                f"{'none' if wanted is None else wanted}",
                field=name,
            )
    if wanted is not None and wanted not in observation.inputs:
        raise InvalidRequestError(f"mode {asked.mode!r} needs the input {wanted!r}", field=wanted)


def _scaled(values: Tensor, pairs: Sequence[tuple[float, float]] | None, *, back: bool) -> Tensor:
    """To [-1, 1] from what it stands for, or `back`."""
    if pairs is None:
        return values
    low, high = torch.tensor(pairs, dtype=torch.float32).unbind(1)
    if back:
        return (values + 1) / 2 * (high - low) + low
    return (values - low) / (high - low) * 2 - 1
