"""The fields by which a router pairs a request's prefill with its decode.

sglang-router sends the same body to both servers, with `bootstrap_host` and `bootstrap_port` (where
the prefill server is asked) and `bootstrap_room` (a number for each prompt): one value, or a list
with one entry a prompt, also where there are `n` completions of a single prompt.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from phalanx.errors import MalformedRequestError

T = TypeVar("T")

DEFAULT_BOOTSTRAP_PORT = 8998
MAX_PORT = 65535
MAX_ROOM = (1 << 63) - 1
"""What routers draw from, and what is sent on as a signed number of 64 bits."""

Hosts = str | list[str | None] | None
Numbers = int | list[int | None] | None


class Bootstrap(msgspec.Struct, frozen=True):
    """Where the prefill server of a request is asked for it, and under which number."""

    host: str
    port: int
    room: int


def bootstraps(host: Hosts, port: Numbers, room: Numbers, count: int) -> list[Bootstrap | None]:
    """One for each of `count` prompts; None where the caller gave none."""
    hosts = _each(host, count, "bootstrap_host")
    ports = _each(port, count, "bootstrap_port")
    rooms = _each(room, count, "bootstrap_room")
    return [_bootstrap(*values) for values in zip(hosts, ports, rooms, strict=True)]


def _bootstrap(host: str | None, port: int | None, room: int | None) -> Bootstrap | None:
    if room is None:
        if host is not None:
            raise MalformedRequestError(
                "bootstrap_host needs a bootstrap_room", field="bootstrap_room"
            )
        return None
    if not host:
        raise MalformedRequestError("bootstrap_room needs a bootstrap_host", field="bootstrap_host")
    if port is None:
        port = DEFAULT_BOOTSTRAP_PORT
    if not 1 <= port <= MAX_PORT:
        raise MalformedRequestError(
            f"bootstrap_port={port} must be from 1 to {MAX_PORT}", field="bootstrap_port"
        )
    if not 0 <= room <= MAX_ROOM:
        raise MalformedRequestError(
            f"bootstrap_room={room} must be from 0 to {MAX_ROOM}", field="bootstrap_room"
        )
    return Bootstrap(host, port, room)


def _each(value: T | list[T | None] | None, count: int, name: str) -> list[T | None]:
    if not isinstance(value, list):
        if value is not None and count > 1 and name == "bootstrap_room":
            raise MalformedRequestError(
                f"{name} is one value for {count} prompts; give a list", field=name
            )
        return [value] * count
    if count == 1 and value:
        return value[:1]
    if len(value) != count:
        raise MalformedRequestError(
            f"{name} has {len(value)} entries for {count} prompts", field=name
        )
    return value
