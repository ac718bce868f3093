"""Ports of this machine that are taken before the process that will listen on them is started.

A socket that is bound and does not listen keeps the kernel from giving the port to anybody who asks
for a free one; whoever is told the port can still listen on it, where it sets SO_REUSEADDR as
servers do.
"""

from __future__ import annotations

import errno
import socket
from typing import Self

from phalanx.errors import ConfigurationError

MAX_PORT = 65535


class PortTakenError(ConfigurationError):
    """Somebody else has the port."""


class ReservedPort:
    """One port of `host`, until `close`."""

    def __init__(self, host: str, *, first: int | None = None, exact: int | None = None) -> None:
        """The `exact` one; else the first from `first` on that is free, or (None) any.

        Raises `ConfigurationError` where there is none, or `host` is no address of this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if exact is None:
                self.number = self._first(host, first)
                # Only now: before, two of these would get the same port.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            else:
                self.number = self._exactly(host, exact)
        except BaseException:
            self.close()
            raise

    def _first(self, host: str, first: int | None) -> int:
        candidates = [0] if first is None else range(first, MAX_PORT + 1)
        for candidate in candidates:
            if self._bind(host, candidate):
                number: int = self._socket.getsockname()[1]
                return number
        raise ConfigurationError(
            f"no port from {first or 1} to {MAX_PORT} is free at {host}; choose a lower first port"
        )

    def _exactly(self, host: str, port: int) -> int:
        """Also where connections of a server that has ended are still remembered there."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Two of these could then bind the same port. A name of the kernel's belongs to one alone,
        # for as long as its process lives.
        try:
            self._claim.bind(f"\0phalanx-port-{host}-{port}")
            is_free = self._bind(host, port)
        except OSError:
            is_free = False
        if not is_free:
            raise PortTakenError(f"port {port} is taken at {host}")
        return port

    def _bind(self, host: str, port: int) -> bool:
        """Whether it was free."""
        try:
            self._socket.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise ConfigurationError(
                f"cannot listen at host {host!r}: {error.strerror}; give an address of this"
                " machine, such as 127.0.0.1"
            ) from None
        return True

    def close(self) -> None:
        self._socket.close()
        self._claim.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
