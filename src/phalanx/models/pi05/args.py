"""Arguments of the `pi05` plugin."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.models.pi.args import PiArgs
from phalanx.models.pi05.config import PI05Config


@dataclass(frozen=True)
class PI05Args(PiArgs):
    """See `PiArgs`. `capture_rollout`: capture rollouts too, on CUDA."""

    config: PI05Config | None = None
    capture_rollout: bool = False
