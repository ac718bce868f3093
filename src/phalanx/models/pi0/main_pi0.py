"""Public names of the pi0 plugin."""

from __future__ import annotations

from phalanx.models.pi.request import RealTimeChunking
from phalanx.models.pi0.args import PI0Args
from phalanx.models.pi0.config import PI0Config
from phalanx.models.pi0.entry import PI0Entry
from phalanx.models.pi0.request import PI0Request

__all__ = ["PI0Args", "PI0Config", "PI0Entry", "PI0Request", "RealTimeChunking"]
