"""The fixture policies: what LeRobot made of the observations that are stored with them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from phalanx.processing.policy import AdapterSettings, PolicyProcessor
from phalanx.schema.observation import Observation

POLICIES = Path(__file__).parents[2] / "fixtures" / "policies"
PI = ("pi05_micro_f32", "pi05_tiny_f32", "pi0_tiny_f32")
TASKS = ("pick up the red_cube\nand put it in the box ", "fold")


def checkpoint(name: str) -> Path:
    return POLICIES / name if name == "act" else POLICIES / name / "checkpoint"


@functools.cache
def stored(name: str) -> Mapping[str, torch.Tensor]:
    return load_file(POLICIES / name / "io.safetensors")


@functools.cache
def processor(name: str) -> PolicyProcessor:
    directory = None if name == "act" else str(POLICIES / name / "tokenizer")
    return PolicyProcessor.from_checkpoint(
        checkpoint(name), AdapterSettings(tokenizer_dir=directory)
    )


def both(name: str, **changed: object) -> Observation:
    """The two rows of a fixture as one batch; `changed` are fields of it."""
    io = stored(name)
    fields: dict[str, object] = {
        "images": {"front": io["in.front_u8"].numpy(), "wrist": io["in.wrist_u8"].numpy()},
        "state": io["in.state"].numpy(),
        "instructions": ("", "") if name == "act" else TASKS,
        "batched": True,
    }
    return Observation(**{**fields, **changed})


def one(name: str, row: int = 0, **changed: object) -> Observation:
    """One row of a fixture."""
    whole = both(name)
    fields: dict[str, object] = {
        "images": {camera: image[row] for camera, image in whole.images.items()},
        "state": whole.state[row],
        "instructions": (whole.instructions[row],),
    }
    return Observation(**{**fields, **changed})


def worst(values: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, in units of what a reference value may be off by."""
    wanted = reference.double()
    off = (values.double() - wanted).abs() / wanted.abs().clamp_min(1)
    return float(off.max() / 5e-6)


def pixels(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 3), np.uint8)
