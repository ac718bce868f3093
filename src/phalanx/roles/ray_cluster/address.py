"""Where a Ray cluster's head listens: looked at before Ray waits minutes for one that is not there."""

from __future__ import annotations

import socket

from phalanx.errors import ConfigurationError

ANY = "auto"
"""The cluster that this machine belongs to."""
_PATIENCE_S = 10.0


def check_address(address: str) -> None:
    """Raises `ConfigurationError` for what is no address, and where nobody listens there."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) <= 65535) or "://" in address:
        raise ConfigurationError(
            f"launcher.address={address!r} must be HOST:PORT of the cluster's head, or {ANY}; the"
            " control process runs on a machine of the cluster"
        )
    if reason := silence(address):
        raise no_answer(address, reason)


def silence(address: str) -> str:
    """Why nobody listens at HOST:PORT; nothing where somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def stale(address: str, reason: str) -> ConfigurationError:
    """What to say where the cluster that this machine belonged to last is no more."""
    return ConfigurationError(
        f"launcher.address='{ANY}' is the cluster that this machine has joined last, and nobody answers"
        f" at {address} any more ({reason}); start one with `ray start --head` or join one with `ray"
        " start --address`, say its HOST:PORT as launcher.address, or leave address out for a cluster of"
        " the job alone"
    )


def no_answer(address: str, reason: str) -> ConfigurationError:
    """What to say where no cluster is."""
    return ConfigurationError(
        f"no Ray cluster answers at launcher.address={address!r} ({reason}); start one with"
        " `ray start --head` and join this machine to it, or leave address out"
    )


def refusal(address: str, error: BaseException) -> ConfigurationError:
    """What to say where Ray could not connect to `address`, which it tried for a while."""
    if _asks_for_token(error):
        return ConfigurationError(
            f"the Ray cluster at launcher.address={address!r} asks for its token; set"
            " RAY_AUTH_MODE=token here and have the token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
            f" (`ray get-auth-token` on its head prints it), or say {ANY}, with which Ray does the"
            " former by itself on a machine of the cluster"
        )
    return no_answer(address, first_line(error))


def _asks_for_token(error: BaseException | None) -> bool:
    """Whether it began with that: of the first error Ray keeps no more than its text."""
    while error is not None:
        if "AuthenticationError" in str(error):
            return True
        error = error.__cause__
    return False


def first_line(error: BaseException) -> str:
    """What Ray says first; the rest is for whoever debugs Ray."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
