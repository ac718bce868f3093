"""Which pairings of prefill and decode servers are taken, and what is said of the others."""

from __future__ import annotations

import pytest

from phalanx.errors import MalformedRequestError
from phalanx.wire.bootstrap import DEFAULT_BOOTSTRAP_PORT, Bootstrap, bootstraps


@pytest.mark.parametrize("room", [0, 2**63 - 1])
def test_rooms_of_63_bits_are_taken(room):
    assert bootstraps("h", None, room, 1) == [Bootstrap("h", DEFAULT_BOOTSTRAP_PORT, room)]


@pytest.mark.parametrize("room", [-1, 2**63, 2**64, 2**80])
def test_other_rooms_are_refused(room):
    with pytest.raises(MalformedRequestError, match=f"bootstrap_room={room} must be from 0 to"):
        bootstraps("h", None, room, 1)


@pytest.mark.parametrize("port", [0, -5, 65536])
def test_ports_that_do_not_exist_are_refused(port):
    with pytest.raises(MalformedRequestError, match=f"bootstrap_port={port} must be"):
        bootstraps("h", port, 1, 1)
