"""Arguments of the plugins `cosmos3` and `cosmos3_policy`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError

NATIVE_OPERATORS = ("auto", "off", "required")


@dataclass(frozen=True)
class Cosmos3Args(EntryArgs):
    """What to load, and for how much at a time.

    `checkpoint_dir`: a directory of diffusers with `transformer/`, `vae/` and `scheduler/`, and
    `text_tokenizer/` where text is served. `max_batch_size`: requests that are denoised together.
    `max_tokens`: tokens of video, sound and actions that one request may have; memory for a step of
    so many is what the model needs beside its weights. `max_text_tokens`: of one prompt.
    `pool_tokens`: tokens of prompts whose keys and values are kept, also for requests to come; None:
    those of two prompts a request, and of one more pair. `weight_strict`: refuse a transformer
    with tensors that are unknown; else they are left out, and logged. `vae_tiling`: decode
    in tiles of 256 pixels, which the ranks share; edges of tiles may show. `native_operators` as in
    `causal_lm`.
    """

    checkpoint_dir: str | Path
    max_batch_size: int = 1
    max_tokens: int = 49152
    max_text_tokens: int = 1024
    pool_tokens: int | None = None
    weight_strict: bool = True
    vae_tiling: bool = False
    native_operators: str = "auto"

    def __post_init__(self) -> None:
        for name, value in (
            ("max_batch_size", self.max_batch_size),
            ("max_tokens", self.max_tokens),
            ("max_text_tokens", self.max_text_tokens),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name}={value!r} must be a positive integer")
        if self.native_operators not in NATIVE_OPERATORS:
            raise ConfigurationError(
                f"native_operators={self.native_operators!r}; allowed: {NATIVE_OPERATORS}"
            )
        self._check_pool()

    def _check_pool(self) -> None:
        least = 2 * self.max_text_tokens
        given = self.pool_tokens
        if given is None:
            return
        if isinstance(given, bool) or not isinstance(given, int) or given < least:
            raise ConfigurationError(
                f"pool_tokens={given!r} must be an integer of at least {least}: one request has a "
                f"prompt and a negative prompt of up to max_text_tokens={self.max_text_tokens}"
            )

    def check_branches(self, cfg_size: int) -> None:
        """Refuse a pool that is too small for ranks with different branches of guidance.

        What each finds in its cache may differ, so there must be room for all that can run: nobody
        waits on one rank and not on the other. Raises `ConfigurationError`.
        """
        least = self.max_batch_size * self.max_text_tokens * cfg_size
        if cfg_size > 1 and self.num_pool_tokens < least:
            raise ConfigurationError(
                f"pool_tokens={self.num_pool_tokens} with cfg_size={cfg_size}: the ranks need room "
                f"for the texts of max_batch_size={self.max_batch_size} requests, at least {least}"
            )

    @property
    def num_pool_tokens(self) -> int:
        """`pool_tokens`, decided."""
        if self.pool_tokens is not None:
            return self.pool_tokens
        return 2 * self.max_text_tokens * (self.max_batch_size + 1)


@dataclass(frozen=True)
class Cosmos3PolicyArgs(Cosmos3Args):
    """`decode_video`: answers bring the pixels of the video beside its latents. The default of
    `max_tokens` is enough for chunks of 32 actions at 480 x 832.
    """

    max_tokens: int = 8192
    decode_video: bool = False
