"""Sizes of a pi policy that its user gives where the checkpoint does not say."""

from __future__ import annotations

from dataclasses import dataclass, fields

from phalanx.errors import ConfigurationError

_FLOATS = ("min_period", "max_period")


@dataclass(frozen=True)
class PiConfig:
    """None is what the checkpoint says, and without a checkpoint what the published model has.

    A number that contradicts the checkpoint's tensors is refused. Neither its tensors nor its
    `config.json` tell `vision_num_heads`, so a tower that is not 1152 wide needs it here.
    `image_size`: pixels of a square image's side. `tokenizer_max_length`: tokens of a padded
    prompt. `num_steps`: Euler steps of a request that does not say.
    """

    vision_width: int | None = None
    vision_inner_width: int | None = None
    vision_num_layers: int | None = None
    vision_num_heads: int | None = None
    patch_size: int | None = None
    image_size: int | None = None
    num_cameras: int | None = None
    text_width: int | None = None
    text_inner_width: int | None = None
    expert_width: int | None = None
    expert_inner_width: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    chunk_size: int | None = None
    max_action_dim: int | None = None
    max_state_dim: int | None = None
    tokenizer_max_length: int | None = None
    num_steps: int | None = None
    min_period: float | None = None
    max_period: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            whole = isinstance(value, int) and not isinstance(value, bool)
            fits = whole or (name in _FLOATS and isinstance(value, float))
            if not fits or not value > 0:
                raise ConfigurationError(
                    f"{type(self).__name__}.{name}={value!r} must be a positive "
                    f"{'number' if name in _FLOATS else 'integer'}, or None for the checkpoint's own"
                )

    def given(self) -> dict[str, float]:
        """The sizes that are not None, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(PiConfig)}
        return {name: value for name, value in values.items() if value is not None}
