"""An address at which no cluster is, is refused before Ray waits for it."""

from __future__ import annotations

import socket

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.ray_cluster.address import check_address, refusal


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:0", "ray://head:10001", "h:x"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigurationError, match="must be HOST:PORT of the cluster's head"):
        check_address(address)


def test_where_nobody_listens_there_is_no_cluster():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_address(address)
    with pytest.raises(ConfigurationError) as refused:
        check_address(address)
    message = str(refused.value)
    assert f"no Ray cluster answers at launcher.address='{address}' (Connection refused)" in message
    assert "ray start --head" in message


def test_a_cluster_that_asks_for_its_token_is_told_from_one_that_is_not_there():
    absent = ConnectionError("Failed to connect to Ray cluster at 10.0.0.7:6379\nand more")
    assert "(Failed to connect to Ray cluster at 10.0.0.7:6379)" in str(
        refusal("10.0.0.7:6379", absent)
    )
    # As Ray raises it: what was refused is in the text of the cause alone.
    absent.__cause__ = RuntimeError(
        "Failed to connect to GCS.\nray.exceptions.AuthenticationError: ..."
    )
    message = str(refusal("10.0.0.7:6379", absent))
    assert "launcher.address='10.0.0.7:6379' asks for its token; set RAY_AUTH_MODE=token" in message
