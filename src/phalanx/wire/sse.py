"""Framing of server-sent events."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"


def data_line(payload: bytes) -> bytes:
    """One event without a name."""
    return b"data: " + payload + b"\n\n"


def named_event(name: str, payload: bytes) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"
