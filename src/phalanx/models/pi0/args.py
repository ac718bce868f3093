"""Arguments of the `pi0` plugin."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.models.pi.args import PiArgs
from phalanx.models.pi0.config import PI0Config


@dataclass(frozen=True)
class PI0Args(PiArgs):
    """See `PiArgs`."""

    config: PI0Config | None = None
