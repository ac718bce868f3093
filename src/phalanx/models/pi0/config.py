"""Sizes of pi0: those of the published model, and those that a user gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.models.pi.config import PiConfig
from phalanx.models.pi.geometry import PUBLISHED


@dataclass(frozen=True)
class PI0Config(PiConfig):
    """See `PiConfig`."""


PI0_BASE = replace(PUBLISHED, tokenizer_max_length=48)
