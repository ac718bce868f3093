"""What every benchmarked Cosmos3's process is asked: the latents of requests of a case."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from command_loop import Message, answer_commands  # type: ignore[import-not-found]

Floats = npt.NDArray[np.float32]
FIRST_TOKEN = 10
DOMAIN, DOMAIN_ID, RAW_ACTION_DIM = "droid_lerobot", 8, 10
STRIDE, FRAMES = 16, 4
"""Pixels and frames that one latent stands for."""


@dataclass(frozen=True)
class Start:
    """What to load; `channels`, `action_dim` and `vocab_size` are the checkpoint's.

    `num_ranks` compute the branches of guidance, on `threads` each.
    """

    checkpoint: str
    dtype: str
    device: str
    threads: int
    num_ranks: int
    channels: int
    action_dim: int
    vocab_size: int
    policy: bool


@dataclass(frozen=True)
class Case:
    """As the benchmark's own. Of `action_rows` 0 it is a video."""

    frames: int
    height: int
    width: int
    prompt_tokens: int
    negative_tokens: int
    action_rows: int
    num_steps: int
    guidance: float
    fps: float


@dataclass(frozen=True)
class Inputs:
    """A request, the same in every process. `noise` (1, C, T, H, W), of which a policy's first frame
    is `known` (1, C, 1, H, W); `action_noise` (rows, actions).
    """

    case: Case
    prompt: list[int]
    negative: list[int]
    noise: Floats
    known: Floats
    action_noise: Floats


class World(Protocol):
    """One system under measurement, loaded."""

    def latents(self, inputs: Inputs) -> tuple[Floats, Floats]:
        """Those of the video, and the actions (rows, raw); empty of a video."""
        ...

    def processor_s(self) -> dict[int, float]:
        """Processor time that each of its processes has used, by its number."""
        ...

    def rate(self) -> float:
        """Operations a second of large matrix products, where it is loaded."""
        ...

    def describe(self) -> str: ...
    def close(self) -> None: ...


def serve(load: Callable[[Start], World]) -> None:
    """Answer commands from standard input until it ends."""
    starts: list[Start] = []

    def start(message: Message) -> World:
        starts.append(Start(**message))
        return load(starts[0])

    def given(message: Message) -> Inputs:
        return inputs_of(starts[0], Case(**message["case"]), message["seed"])

    def latents(world: World, message: Message) -> Message:
        video, actions = world.latents(given(message))
        return {"video": video.ravel().tolist(), "actions": actions.ravel().tolist()}

    def run(world: World, message: Message) -> Message:
        inputs, before = given(message), world.processor_s()
        began_s = time.perf_counter()
        world.latents(inputs)
        elapsed_s = time.perf_counter() - began_s
        after = world.processor_s()
        used = [spent_s - before.get(number, 0.0) for number, spent_s in after.items()]
        return {"elapsed_s": elapsed_s, "busiest_s": max(used)}

    def rate(world: World, message: Message) -> Message:
        return {"flops_per_s": world.rate()}

    answer_commands(start, {"latents": latents, "run": run, "rate": rate})


def inputs_of(start: Start, case: Case, seed: int) -> Inputs:
    """Texts and noise of that size."""
    random = np.random.default_rng(seed)
    shape = (1, start.channels, *latent_shape(case))

    def text(length: int) -> list[int]:
        return [int(each) for each in random.integers(FIRST_TOKEN, start.vocab_size, length)]

    def drawn(*size: int) -> Floats:
        return random.standard_normal(size, np.float32)

    prompt, negative = text(case.prompt_tokens), text(case.negative_tokens)
    noise, known = drawn(*shape), drawn(*shape[:2], 1, *shape[3:])
    action_noise = drawn(case.action_rows, start.action_dim)
    action_noise[:, RAW_ACTION_DIM:] = 0
    if case.action_rows:
        noise[:, :, :1] = known
    return Inputs(case, prompt, negative, noise, known, action_noise)


def latent_shape(case: Case) -> tuple[int, int, int]:
    """Latent frames, rows and columns."""
    return (case.frames - 1) // FRAMES + 1, case.height // STRIDE, case.width // STRIDE


def no_actions() -> Floats:
    return np.zeros((0, 0), np.float32)


def arguments(inputs: Inputs) -> dict[str, Any]:
    """What both systems call by the same names."""
    case = inputs.case
    return {
        "num_inference_steps": case.num_steps,
        "guidance_scale": case.guidance,
        "fps": case.fps,
    }
