"""What one peer may make a connection hold, wait for, or do."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.gateway.http2.frames import FIRST_WINDOW, MAX_WINDOW, Setting

MIB = 1024 * 1024


@dataclass(frozen=True)
class Http2Limits:
    """`stream_window_bytes` may be on their way, or wait, for each stream, `window_bytes` for all.

    `max_frame_bytes` is the largest frame of data. `max_header_bytes` bounds a header block as it
    comes, and what it says. `max_written_bytes` wait for a peer that does not read before it is
    given up. `wasted_burst` and `wasted_per_s` are things that a peer may do that cost something and
    bring nothing: streams that it opens and resets, pings, settings, empty frames.
    A peer says within `greeting_timeout_s` what it takes, takes something of each stream within
    twice `stall_timeout_s`, and within `linger_s` what is left for it when the connection closes.
    """

    max_streams: int = 1024
    stream_window_bytes: int = 4 * MIB
    window_bytes: int = 32 * MIB
    max_frame_bytes: int = MIB
    max_header_bytes: int = 32 * 1024
    max_written_bytes: int = 4 * MIB
    wasted_burst: int = 1000
    wasted_per_s: float = 100.0
    greeting_timeout_s: float = 10.0
    stall_timeout_s: float = 60.0
    linger_s: float = 5.0

    @property
    def settings(self) -> dict[Setting, int]:
        """As the peer is told of them."""
        return {
            Setting.HEADER_TABLE_SIZE: 0,
            Setting.INITIAL_WINDOW_SIZE: self.stream_window_bytes,
            Setting.MAX_FRAME_SIZE: self.max_frame_bytes,
            Setting.MAX_HEADER_LIST_SIZE: self.max_header_bytes,
        }

    def __post_init__(self) -> None:
        assert FIRST_WINDOW <= self.window_bytes <= MAX_WINDOW
