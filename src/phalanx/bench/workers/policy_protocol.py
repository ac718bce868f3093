"""What every benchmarked policy's process is asked: chunks of actions for observations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from command_loop import Message, answer_commands  # type: ignore[import-not-found]

Floats = npt.NDArray[np.float32]
VOCABULARY_START = 10


@dataclass(frozen=True)
class Start:
    """What to load: `geometry` has the sizes by name, `cameras` the checkpoint's names of them."""

    checkpoint: str
    dtype: str
    threads: int
    geometry: dict[str, int]
    cameras: list[str]
    rows: int


@dataclass(frozen=True)
class Observation:
    """`images` (cameras, 3, S, S) in [0, 1], of which the first `num_cameras` are there; `tokens` and
    `mask` (L,); `noise` (chunk, actions).
    """

    images: Floats
    num_cameras: int
    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    noise: Floats


class Policy(Protocol):
    """One system under measurement, loaded."""

    def chunks(self, observations: Sequence[Observation]) -> list[Floats]:
        """The normalized actions (chunk, actions) of observations that arrive together."""
        ...

    def describe(self) -> str: ...
    def close(self) -> None: ...


def serve(load: Callable[[Start], Policy]) -> None:
    """Answer commands from standard input until it ends."""
    starts: list[Start] = []

    def start(message: Message) -> Policy:
        starts.append(Start(**message))
        return load(starts[0])

    def observations(message: Message) -> list[Observation]:
        sizes = starts[0].geometry, len(starts[0].cameras)
        cameras, prompt = message["num_cameras"], message["prompt_tokens"]
        return [observe(*sizes, cameras, prompt, seed) for seed in range(message["count"])]

    def actions(policy: Policy, message: Message) -> Message:
        return {"actions": [each.tolist() for each in policy.chunks(observations(message))]}

    def alone(policy: Policy, message: Message) -> Message:
        return _timed([[each] for each in observations(message)], policy)

    def together(policy: Policy, message: Message) -> Message:
        return _timed([observations(message)], policy)

    answer_commands(start, {"actions": actions, "alone": alone, "together": together})


def observe(
    geometry: dict[str, int], most_cameras: int, num_cameras: int, prompt_tokens: int, seed: int
) -> Observation:
    """Noise of that size, the same in every process."""
    random = np.random.default_rng(seed)
    side, length = geometry["image_size"], geometry["tokenizer_max_length"]
    tokens = np.zeros(length, np.int64)
    tokens[:prompt_tokens] = random.integers(
        VOCABULARY_START, geometry["vocab_size"], prompt_tokens
    )
    noise = random.standard_normal((geometry["chunk_size"], geometry["max_action_dim"]))
    return Observation(
        images=random.random((most_cameras, 3, side, side), np.float32),
        num_cameras=num_cameras,
        tokens=tokens,
        mask=np.arange(length) < prompt_tokens,
        noise=noise.astype(np.float32),
    )


def _timed(groups: Sequence[Sequence[Observation]], policy: Policy) -> dict[str, Any]:
    """The time of each group, one after another."""
    times_s = []
    for group in groups:
        began_s = time.perf_counter()
        policy.chunks(group)
        times_s.append(time.perf_counter() - began_s)
    return {"times_s": times_s}
