"""What the peer of a connection has asked for in its settings."""

from __future__ import annotations

from phalanx.gateway.http2.frames import (
    FIRST_WINDOW,
    LEAST_FRAME_BYTES,
    MAX_WINDOW,
    MOST_FRAME_BYTES,
    ConnectionFault,
    ErrorCode,
    Setting,
    settings_in,
)


class PeerSettings:
    """The protocol's own values until the peer says otherwise."""

    def __init__(self) -> None:
        self.max_streams = MAX_WINDOW
        self.first_window = FIRST_WINDOW
        self.max_frame_bytes = LEAST_FRAME_BYTES

    def update(self, payload: bytes, *, from_server: bool) -> None:
        """Raises `ConnectionFault` for a value that may not be; unknown settings mean nothing."""
        for setting, value in settings_in(payload):
            if setting == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ConnectionFault(
                        ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {value}"
                    )
                self.first_window = value
            elif setting == Setting.MAX_FRAME_SIZE:
                if not LEAST_FRAME_BYTES <= value <= MOST_FRAME_BYTES:
                    raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {value}")
                self.max_frame_bytes = value
            elif setting == Setting.MAX_CONCURRENT_STREAMS:
                self.max_streams = value
            elif setting == Setting.ENABLE_PUSH and (value > 1 or (value and from_server)):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
