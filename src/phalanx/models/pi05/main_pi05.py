"""Public names of the pi0.5 plugin."""

from __future__ import annotations

from phalanx.models.pi.request import RealTimeChunking
from phalanx.models.pi.rollout import PI05RolloutOutput
from phalanx.models.pi05.args import PI05Args
from phalanx.models.pi05.config import PI05Config
from phalanx.models.pi05.entry import PI05Entry
from phalanx.models.pi05.request import PI05Request, PI05RolloutRequest

__all__ = [
    "PI05Args",
    "PI05Config",
    "PI05Entry",
    "PI05Request",
    "PI05RolloutOutput",
    "PI05RolloutRequest",
    "RealTimeChunking",
]
