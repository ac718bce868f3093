"""Says on stderr, while an operation of a job has not ended, which requests it waits for, and at
Ctrl-C that it goes on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from phalanx.cli.control_client import ControlClient
from phalanx.cli.up import INTERRUPTED
from phalanx.errors import PhalanxError
from phalanx.roles.events import EventKind

_WAIT_S = 0.5
"""For the next event: an operation that has ended is noticed no later."""


@contextmanager
def goes_on_without_us(words: str) -> Iterator[None]:
    """At Ctrl-C, end the command and say with `words` that the operation is only not waited for."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"phalanx: not waited for: {words}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


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
