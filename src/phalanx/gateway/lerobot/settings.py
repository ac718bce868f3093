"""What can be set of the service for LeRobot's clients."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.wire.lerobot import DEFAULT_MAX_BYTES


@dataclass(frozen=True, kw_only=True)
class LeRobotSettings:
    """Actions are `1 / fps` seconds apart. `GetActions` is answered empty after `poll_s`.

    `infer_timeout_s` is for one inference, `upload_timeout_s` for all messages of one observation.
    `SendPolicyInstructions` waits `setup_wait_s` for a server of the model to become ready. A robot
    that sends nothing for `expiry_s` is forgotten; one whose clock is more than `max_skew_s` off is
    told.
    """

    fps: float = 30.0
    poll_s: float = 2.0
    infer_timeout_s: float = 30.0
    upload_timeout_s: float = 30.0
    setup_wait_s: float = 15.0
    expiry_s: float = 600.0
    max_skew_s: float = 5.0
    max_sessions: int = 1024
    max_upload_bytes: int = DEFAULT_MAX_BYTES
