"""Ports that are nobody else's until the process that was told of them listens."""

from __future__ import annotations

import socket

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.ports import PortTakenError, ReservedPort


def listening(port: int) -> socket.socket:
    """As a server does it."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_a_server_can_listen_on_a_reserved_port():
    with ReservedPort("127.0.0.1") as port, listening(port.number) as server:
        with socket.create_connection(("127.0.0.1", port.number)):
            pass
        assert server.getsockname()[1] == port.number


def test_two_never_get_the_same_one():
    with ReservedPort("127.0.0.1", first=20000) as one:
        with ReservedPort("127.0.0.1", first=one.number) as other:
            assert other.number > one.number


def test_one_that_somebody_listens_on_is_passed_over():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free.listen()
        taken = free.getsockname()[1]
        with ReservedPort("127.0.0.1", first=taken) as port:
            assert port.number > taken


def test_an_exact_one_is_free_again_as_soon_as_its_server_has_ended():
    with ReservedPort("127.0.0.1") as port, listening(port.number) as server:
        with socket.create_connection(("127.0.0.1", port.number)) as caller:
            accepted, _ = server.accept()
            accepted.close()  # the server's side ends it, so that the kernel remembers it there
            assert caller.recv(1) == b""
    with ReservedPort("127.0.0.1", exact=port.number) as again, listening(again.number) as server:
        assert server.getsockname()[1] == port.number


def test_an_exact_one_is_nobody_elses():
    with ReservedPort("127.0.0.1") as found:
        number = found.number
    with ReservedPort("127.0.0.1", exact=number):
        with pytest.raises(PortTakenError, match=f"port {number} is taken"):
            ReservedPort("127.0.0.1", exact=number)
    with socket.socket() as other:
        other.bind(("127.0.0.1", number))
        with pytest.raises(PortTakenError):
            ReservedPort("127.0.0.1", exact=number)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.listen()
        with pytest.raises(PortTakenError):
            ReservedPort("127.0.0.1", exact=number)


def test_where_none_is_left_it_says_so():
    with ReservedPort("127.0.0.1", first=65535) as last:
        assert last.number == 65535
        with pytest.raises(ConfigurationError, match="no port from 65535 to 65535 is free"):
            ReservedPort("127.0.0.1", first=65535)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigurationError, match=r"host '192\.0\.2\.1'.*address of this machine"):
        ReservedPort("192.0.2.1")
    with pytest.raises(ConfigurationError, match=r"host '192\.0\.2\.1'.*address of this machine"):
        ReservedPort("192.0.2.1", exact=30000)
