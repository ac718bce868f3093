"""Ports of this machine that are taken before the process that will listen on them is started.

A socket that is bound and does not listen keeps the kernel from giving the port to anybody who asks
for a free one; whoever is told the port can still listen on it, where it sets SO_REUSEADDR as
servers do.
"""

from __future__ import annotations

import errno
import socket
from types import TracebackType
from typing import Self

from phalanx.errors import ConfigurationError

MAX_PORT = 65535


class ReservedPort:
    """One port of `host`, until `close`."""

    def __init__(self, host: str, *, first: int | None = None) -> None:
        """The first port from `first` on that is free, or any (None).

        Raises `ConfigurationError` where there is none, or `host` is no address of this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.number = self._bind(host, first)
        except BaseException:
            self._socket.close()
            raise
        # Only now: before, two of these would get the same port.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def _bind(self, host: str, first: int | None) -> int:
        candidates = [0] if first is None else range(first, MAX_PORT + 1)
        for candidate in candidates:
            try:
                self._socket.bind((host, candidate))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise ConfigurationError(
                    f"cannot listen at host {host!r}: {error.strerror}; give an address of this"
                    " machine, such as 127.0.0.1"
                ) from None
            number: int = self._socket.getsockname()[1]
            return number
        raise ConfigurationError(
            f"no port from {first or 1} to {MAX_PORT} is free at {host}; choose a lower first port"
        )

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
