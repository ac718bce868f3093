"""Ports for the rendezvous of replicas, so that engines of different tests do not meet."""

from __future__ import annotations

import socket


def free_base_port(count: int = 1) -> int:
    """The first of `count` free ports in a row."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            base = first.getsockname()[1]
        if base + count > 65535 or not all(_free(base + step) for step in range(count)):
            continue
        return base


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
