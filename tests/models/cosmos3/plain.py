"""A loop written out: one request, one branch after another, no cache, no step engine."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.layers.unipc import UniPCSolver, UniPCState
from phalanx.models.cosmos3.media import MediaRow, Velocity
from phalanx.models.cosmos3.row import ACTIONS, SOUND, VISION, RowInputs
from phalanx.models.cosmos3.transformer import Cosmos3Transformer
from tests.models.cosmos3.standing_in import Forward


@torch.inference_mode()
def plain_loop(transformer: Cosmos3Transformer, inputs: RowInputs) -> dict[str, Tensor]:
    """The last latents by modality."""
    latents = _begun(inputs)
    solver = UniPCSolver(inputs.schedule)
    states = {name: UniPCState() for name in latents}
    low, high = inputs.guidance.interval or (0, 1001)
    for at, timestep in enumerate(inputs.schedule.timesteps.tolist()):
        row = _row(inputs, latents, timestep)
        velocities = _velocity(transformer, inputs.prompt, row)
        if inputs.guidance.scale != 1 and low <= timestep <= high:
            away = _velocity(transformer, inputs.negative, row)
            for name, there in away.items():
                velocities[name] = there + inputs.guidance.scale * (velocities[name] - there)
        if ACTIONS in velocities:
            velocities[ACTIONS][:, inputs.raw_action_dim :] = 0
        for name, velocity in velocities.items():
            latents[name], states[name] = solver.step(states[name], at, velocity, latents[name])
    return latents


def _begun(inputs: RowInputs) -> dict[str, Tensor]:
    noise, shape = inputs.noise, inputs.shape
    latents = {VISION: noise.vision.clone()}
    for frame in shape.clean_frames:
        latents[VISION][:, frame] = inputs.known[:, frame]
    if noise.sound is not None:
        latents[SOUND] = noise.sound
    if noise.actions is not None:
        latents[ACTIONS] = noise.actions.clone()
        for row in shape.clean_rows:
            latents[ACTIONS][row] = inputs.known_actions[row]
        latents[ACTIONS][:, inputs.raw_action_dim :] = 0
    return latents


def _row(inputs: RowInputs, latents: dict[str, Tensor], timestep: int) -> MediaRow:
    sound, actions = latents.get(SOUND), latents.get(ACTIONS)
    return replace(
        inputs.noise, timestep=timestep, vision=latents[VISION], sound=sound, actions=actions
    )


def _velocity(
    transformer: Cosmos3Transformer, ids: tuple[int, ...], row: MediaRow
) -> dict[str, Tensor]:
    found: Velocity = Forward.of(transformer, torch.tensor(ids), row).run()
    parts = {VISION: found.vision, SOUND: found.sound, ACTIONS: found.actions}
    return {name: part.clone() for name, part in parts.items() if part is not None}
