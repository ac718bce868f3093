"""Sizes of pi0.5: those of the published model, and those that a user gives."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigurationError
from phalanx.models.pi.config import PiConfig
from phalanx.models.pi.geometry import PiGeometry


@dataclass(frozen=True)
class PI05Config(PiConfig):
    """See `PiConfig`. `add_value_head`: a critic, for rollouts; its weights are those of the
    checkpoint, or come with the first update. `value_from`: it values the `prefix`, once, or the
    `suffix`, at each step.
    """

    add_value_head: bool = False
    value_from: str = "suffix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_from not in ("prefix", "suffix"):
            raise ConfigurationError(f"value_from={self.value_from!r}; allowed: prefix, suffix")


PI05_BASE = PiGeometry(
    vision_width=1152,
    vision_inner_width=4304,
    vision_num_layers=27,
    vision_num_heads=16,
    patch_size=14,
    image_size=224,
    num_cameras=3,
    text_width=2048,
    text_inner_width=16384,
    expert_width=1024,
    expert_inner_width=4096,
    num_layers=18,
    num_heads=8,
    num_kv_heads=1,
    head_dim=256,
    vocab_size=257152,
    chunk_size=50,
    max_action_dim=32,
    max_state_dim=32,
    tokenizer_max_length=200,
    num_steps=10,
    min_period=4e-3,
    max_period=4.0,
)
