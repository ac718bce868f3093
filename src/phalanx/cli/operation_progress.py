"""Says on stderr, while an operation of a job has not ended, which requests it waits for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.cli.control_client import ControlClient
from phalanx.errors import PhalanxError
from phalanx.roles.events import EventKind

_WAIT_S = 0.5
"""For the next event: an operation that has ended is noticed no later."""


@contextmanager
def waiting_told(client: ControlClient, role: str) -> Iterator[None]:
    """Follow the events of a role until this is left."""
    ended, last = threading.Event(), client.job().last_event
    follower = threading.Thread(target=_follow, args=(client, role, last, ended), daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _follow(client: ControlClient, role: str, last: int, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            events = client.events(last, _WAIT_S)
        except (PhalanxError, OSError):
            return  # whoever asks for the operation hears of it too
        for event in events:
            last = event.number
            if event.role == role and event.kind is EventKind.WAITING:
                print(f"phalanx: {role}/{event.engine_id} waits {event.detail}", file=sys.stderr)
