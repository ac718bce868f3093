"""The secret that the machines of one replica share, and how two of them prove to each other that
they have it, before either takes anything else from the other.

Each proves it with an HMAC-SHA256 over both sides' random numbers (RFC 2104): the follower first,
then the head. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket

from phalanx import settings
from phalanx.engine.workers.node_stream import exactly
from phalanx.errors import ConfigurationError, EngineUnavailableError
from phalanx.schema.deployment import WorkerSupervisorConfig
from phalanx.schema.loopback import is_loopback

_MAGIC = b"phxnode1"
_RANDOM = 32
_PROOF = hashlib.sha256().digest_size
_LET_IN, _REFUSED = b"+", b"-"
_OF_FOLLOWER, _OF_HEAD = b"follower", b"head"


def node_key(config: WorkerSupervisorConfig) -> bytes:
    """The key of this machine's replica. Machines that meet at a loopback address may have none.

    Raises `ConfigurationError`.
    """
    key = settings.node_key()
    if key is None and not is_loopback(config.master_addr):
        raise ConfigurationError(
            f"the machines of this replica meet at {config.master_addr}, which others may reach,"
            " and PHALANX_NODE_KEY is not set; set it to the same secret of 16 characters or more on"
            " each of them (`openssl rand -hex 32` makes one), have `phalanx up` start them, or meet"
            " at a loopback address"
        )
    return b"" if key is None else key.encode()


class StrangerError(Exception):
    """Who has connected, or what answers, has not the key; the message says what it did."""


def admit(link: socket.socket, key: bytes) -> None:
    """The head's part. Raises `StrangerError`, and `OSError` where the connection fails."""
    ours = secrets.token_bytes(_RANDOM)
    link.sendall(_MAGIC + ours)
    said = exactly(link, _RANDOM + _PROOF)
    if said is None:
        raise StrangerError("it has said nothing of a key")
    theirs, proof = said[:_RANDOM], said[_RANDOM:]
    if not hmac.compare_digest(proof, _proof(key, _OF_FOLLOWER, ours, theirs)):
        link.sendall(_REFUSED)
        raise StrangerError("it has another PHALANX_NODE_KEY than this machine, or none")
    link.sendall(_LET_IN + _proof(key, _OF_HEAD, ours, theirs))


def introduce(link: socket.socket, key: bytes, head: str) -> None:
    """A follower's part. Raises `EngineUnavailableError` for what is not its head, and `OSError`
    where the connection fails.
    """
    said = exactly(link, len(_MAGIC) + _RANDOM)
    if said is None:
        raise EngineUnavailableError(f"{head} has gone away")
    if not said.startswith(_MAGIC):
        raise EngineUnavailableError(
            f"what answers as {head} is no head of a replica; give its --dist-init-addr"
        )
    theirs, ours = said[len(_MAGIC) :], secrets.token_bytes(_RANDOM)
    link.sendall(ours + _proof(key, _OF_FOLLOWER, theirs, ours))
    answer = exactly(link, 1)
    if answer == _REFUSED:
        raise EngineUnavailableError(
            f"{head} has another PHALANX_NODE_KEY than this machine, or one of both has none; set"
            " the same on every machine of the replica"
        )
    proof = exactly(link, _PROOF) if answer == _LET_IN else None
    if proof is None:
        raise EngineUnavailableError(f"{head} has gone away")
    if not hmac.compare_digest(proof, _proof(key, _OF_HEAD, theirs, ours)):
        raise EngineUnavailableError(
            f"what answers as {head} does not know this machine's PHALANX_NODE_KEY, and nothing was"
            " taken from it; see who listens there"
        )


def _proof(key: bytes, side: bytes, of_head: bytes, of_follower: bytes) -> bytes:
    return hmac.digest(key, _MAGIC + side + b":" + of_head + of_follower, "sha256")
