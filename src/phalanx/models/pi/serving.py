"""Between robots and pi policies: cameras that are not there are masked, and noise may be seeded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigurationError, InvalidRequestError
from phalanx.models.pi.args import PiArgs
from phalanx.models.pi.building import PolicyKind, geometry_of
from phalanx.models.pi.checkpoint import PiCheckpoint
from phalanx.models.pi.geometry import PiGeometry
from phalanx.models.pi.request import PiRequest, RealTimeChunking
from phalanx.processing.policy import (
    PolicyProcessor,
    adapter_settings,
    resize_with_pad,
    to_policy_range,
)
from phalanx.processing.policy.openpi import OpenpiKind, OpenpiSizes, is_openpi, read_openpi
from phalanx.processing.policy.parameters import (
    FlowParameters,
    RealTimeParameters,
    flow_parameters,
)
from phalanx.processing.policy.tokenization import Tokenization
from phalanx.processing.policy.transition import STATE, TOKEN_MASK, TOKENS, Transition
from phalanx.schema.observation import Actions, Observation, PolicyInfo

NOISE = "noise"
NORMALIZED = "normalized_actions"
MAX_SEED = 2**63


@dataclass(frozen=True, eq=False)
class PreparedObservation:
    """The fields of `PiRequest`, and of pi0 the state that its expert reads."""

    pixel_values: Tensor
    image_masks: Tensor
    input_ids: Tensor
    lang_lens: Tensor
    state: Tensor
    noise: Tensor | None
    num_steps: int | None
    rtc: RealTimeChunking | None


class PiServing(ABC):
    """A `PolicyAdapter`; the weights are not read."""

    def __init__(
        self,
        kind: PolicyKind,
        openpi: OpenpiKind,
        args: PiArgs,
        settings: Mapping[str, Any],
    ) -> None:
        """`openpi` is for checkpoints of openpi, which do not say themselves how they are used.

        Raises `ConfigurationError` without a checkpoint: only one says what a robot's units are.
        """
        if args.checkpoint_dir is None:
            raise ConfigurationError(
                "plugin_args.checkpoint_dir is not given; a policy with random weights has no "
                "units of a robot, and is not served to any"
            )
        directory = Path(args.checkpoint_dir)
        checkpoint = PiCheckpoint(directory, args.weight_remap)
        self._geometry = geometry_of(kind, args, checkpoint.config(), checkpoint.shapes())
        given = adapter_settings(settings)
        sizes = [(height, width) for height, width, _ in args.inputs_image_shape or ()]
        if is_openpi(directory):
            own = _openpi_sizes(self._geometry)
            features, processors = read_openpi(directory, given, openpi, own)
            self._processor = PolicyProcessor.of(
                features, processors, given, sizes=sizes, inputs=(NOISE,)
            )
        else:
            self._processor = PolicyProcessor.from_checkpoint(
                directory, given, sizes=sizes, inputs=(NOISE,)
            )
        _check_checkpoint(self._processor, self._geometry, directory)

    @property
    def info(self) -> PolicyInfo:
        return self._processor.info

    @abstractmethod
    def request(self, observation: Observation) -> PiRequest:
        """The plugin's own request, of what `prepare` makes of the observation."""

    def prepare(self, observation: Observation) -> PreparedObservation:
        """Resized, normalized, tokenized. Raises `InvalidRequestError` naming what is wrong."""
        asked = flow_parameters(observation, self.info.policy)
        seen = self._processor.prepare(observation)
        pixels, masks = self._images(seen)
        mask = seen.observation[TOKEN_MASK]
        return PreparedObservation(
            pixel_values=pixels,
            image_masks=masks,
            input_ids=seen.observation[TOKENS],
            lang_lens=mask.sum(1),
            state=self._padded_state(seen),
            noise=self._noise(observation, asked),
            num_steps=asked.num_steps,
            rtc=self._rtc(observation, asked.rtc),
        )

    def actions(self, output: Tensor, observation: Observation) -> Actions:
        """Also the normalized actions, whole, for a robot that goes on from a chunk by `rtc`."""
        actions = self._processor.actions(output, observation)
        if "rtc" not in observation.parameters:
            return actions
        own = output[..., : self._processor.features.action_dim].detach().cpu().float().numpy()
        return Actions(actions.values, {NORMALIZED: own if observation.batched else own[0]})

    def _images(self, seen: Transition) -> tuple[Tensor, Tensor]:
        """Cameras that are there come first, in the checkpoint's order, as in training."""
        side, count = self._geometry.image_size, self._geometry.num_cameras
        rows = len(seen.tasks)
        pixels = torch.full((rows, count, 3, side, side), -1.0)
        present = [key for key in self._processor.features.cameras if key in seen.observation]
        if len(present) > count:
            raise InvalidRequestError(
                f"there are {len(present)} images; this policy takes {count}", field="images"
            )
        for index, key in enumerate(present):
            image = seen.observation[key]
            pixels[:, index] = to_policy_range(resize_with_pad(image, side, side))
        masks = torch.zeros(rows, count, dtype=torch.bool)
        masks[:, : len(present)] = True
        return pixels, masks

    def _padded_state(self, seen: Transition) -> Tensor:
        state = seen.observation[STATE]
        # A state that is too wide is refused with the request.
        padding = max(0, self._geometry.max_state_dim - state.shape[-1])
        return torch.nn.functional.pad(state, (0, padding))

    def _noise(self, observation: Observation, asked: FlowParameters) -> Tensor | None:
        shape = (self._geometry.chunk_size, self._geometry.max_action_dim)
        rows = observation.num_rows
        given = observation.inputs.get(NOISE)
        if given is not None:
            wanted = (rows, *shape) if observation.batched else shape
            if given.shape != wanted or given.dtype != np.float32:
                raise InvalidRequestError(
                    f"noise is {given.dtype} of shape {given.shape}; give float32 of shape "
                    f"{wanted}",
                    field=NOISE,
                )
            return torch.from_numpy(given.reshape(rows, *shape).copy())
        if asked.seed is None:
            return None
        if not 0 <= asked.seed < MAX_SEED:
            raise InvalidRequestError(
                f"seed={asked.seed} must be from 0 to {MAX_SEED - 1}", field="seed"
            )
        generator = torch.Generator().manual_seed(asked.seed)
        return torch.randn(rows, *shape, generator=generator)

    def _rtc(
        self, observation: Observation, asked: RealTimeParameters | None
    ) -> RealTimeChunking | None:
        if asked is None:
            return None
        if asked.prev_chunk_left_over is not None:
            old = _chunk("prev_chunk_left_over", asked.prev_chunk_left_over, observation)
        elif asked.prev_actions is not None:
            actions = _chunk("prev_actions", asked.prev_actions, observation)
            old = self._processor.normalized_actions(actions, observation)
        else:
            return None
        return RealTimeChunking(
            prev_chunk_left_over=old,
            inference_delay=asked.inference_delay,
            execution_horizon=asked.execution_horizon,
            mode=asked.mode,
            schedule=asked.schedule,
            max_guidance_weight=asked.max_guidance_weight,
        )


def _openpi_sizes(geometry: PiGeometry) -> OpenpiSizes:
    return OpenpiSizes(
        image_size=geometry.image_size,
        num_cameras=geometry.num_cameras,
        chunk_size=geometry.chunk_size,
        prompt_length=geometry.tokenizer_max_length,
    )


def _check_checkpoint(processor: PolicyProcessor, geometry: PiGeometry, directory: Path) -> None:
    """Refuse, before anything is served, files that no request could be made by."""
    features, prompts = processor.features, geometry.tokenizer_max_length
    steps = processor.processors.before.steps
    made = [step.settings for step in steps if isinstance(step, Tokenization)]
    if not made:
        raise CheckpointError(
            f"{directory}: policy_preprocessor.json has no tokenizer_processor, which makes the "
            "policy's prompt; save it with LeRobot again"
        )
    for settings in made:
        told = (settings.max_length, settings.padding, settings.padding_side)
        if told != (prompts, "max_length", "right"):
            raise CheckpointError(
                f"{directory}: policy_preprocessor.json pads prompts to max_length={told[0]} by "
                f"padding={told[1]!r} at the {told[2]}; the policy takes prompts of {prompts} "
                "tokens, padded to 'max_length' at the right"
            )
    if features.state_dim is None:
        raise CheckpointError(
            f"{directory}: config.json names no {STATE!r}, which the policy takes"
        )
    if features.action_dim > geometry.max_action_dim:
        raise CheckpointError(
            f"{directory}: config.json gives actions of {features.action_dim} numbers, and the "
            f"policy's have {geometry.max_action_dim}"
        )


def _chunk(name: str, values: Sequence[object], observation: Observation) -> Tensor:
    """Actions as (B, n, a); a single observation's may come without the dimension of rows."""
    rows = observation.num_rows
    try:
        chunk = torch.tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidRequestError(
            f"rtc.{name} must be a list of actions, each a list of numbers: {error}", field="rtc"
        ) from error
    if chunk.ndim == 2 and not observation.batched:
        chunk = chunk[None]
    if chunk.ndim != 3 or len(chunk) != rows or 0 in chunk.shape:
        raise InvalidRequestError(
            f"rtc.{name} has shape {tuple(chunk.shape)}; give actions of {rows} rows", field="rtc"
        )
    return chunk
