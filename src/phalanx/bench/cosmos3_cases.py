"""What Cosmos3 is asked in a benchmark, and how many operations that takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from phalanx.bench.cosmos3_geometry import Geometry

STRIDE = 32
"""Pixels that a patch of the latents stands for, in each direction."""
FRAMES = 4
"""Frames of the video that a latent frame stands for, behind the first."""


@dataclass(frozen=True)
class Case:
    """A request: a video of `frames`, or with `action_rows` a robot's actions of one picture.

    `guidance` computes a second branch, of a negative prompt of `negative_tokens`.
    """

    key: str
    label: str
    frames: int
    height: int
    width: int
    prompt_tokens: int
    negative_tokens: int
    action_rows: int = 0
    num_steps: int = 4
    guidance: float = 3.0
    fps: float = 24.0

    @property
    def num_tokens(self) -> int:
        """Of media, in each branch."""
        rows, columns = -(-self.height // STRIDE), -(-self.width // STRIDE)
        return self.latent_frames * rows * columns + self.action_rows

    @property
    def latent_frames(self) -> int:
        return (self.frames - 1) // FRAMES + 1

    def message(self) -> dict[str, int | float]:
        """As a system under measurement is told it."""
        values = asdict(self)
        del values["key"], values["label"]
        return values


POLICY = Case(
    "policy", "16 actions and 17 frames", 17, 256, 256, 160, 32, action_rows=16, fps=15.0
)  # fmt: skip
VIDEO = Case("video", "33 frames", 33, 256, 256, 256, 256, guidance=6.0)
CASES = (POLICY, VIDEO)
ON_DEVICE = Case(
    "device", "32 actions and 33 frames of 480 x 832", 33, 480, 832, 96, 96, action_rows=32, fps=15.0
)  # fmt: skip
"""At Nano's sizes one step of it is 113.6 TFLOP."""


def pass_flops(g: Geometry, queries: int, keys: int) -> int:
    """Operations of `queries` tokens in all layers of a stream that attend to `keys`: matrix products
    and attention, two for each multiplication.
    """
    heads, kv_heads = g.num_attention_heads * g.head_dim, g.num_key_value_heads * g.head_dim
    width = g.hidden_size
    projections = 2 * queries * width * (heads + 2 * kv_heads) + 2 * queries * heads * width
    attention = 4 * queries * keys * heads
    feed_forward = 6 * queries * width * g.intermediate_size
    return g.num_hidden_layers * (projections + attention + feed_forward)


def media_flops(g: Geometry, case: Case, text_tokens: int) -> int:
    """One step of one branch, behind so many tokens of text."""
    return pass_flops(g, case.num_tokens, case.num_tokens + text_tokens)


def text_flops(g: Geometry, text_tokens: int) -> int:
    """A prompt, read once."""
    return pass_flops(g, text_tokens, text_tokens)


def step_flops(g: Geometry, case: Case) -> int:
    """One guided step."""
    return sum(media_flops(g, case, text) for text in (case.prompt_tokens, case.negative_tokens))


def text_share(g: Geometry, case: Case) -> float:
    """Which part of a step that reads both prompts anew is the reading."""
    texts = sum(text_flops(g, text) for text in (case.prompt_tokens, case.negative_tokens))
    return texts / (texts + step_flops(g, case))
