"""Ports for the rendezvous of replicas, so that engines of different tests do not meet."""

from __future__ import annotations

import random
import socket

FIRST, EPHEMERAL = 16384, 32768
"""From the second on the system gives ports to whoever connects, at any time. None of those is ours."""


def free_base_port(count: int = 1) -> int:
    """The first of `count` free ports in a row."""
    choose = random.SystemRandom()
    while True:
        base = choose.randrange(FIRST, EPHEMERAL - count)
        if all(_free(base + step) for step in range(count)):
            return base


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
