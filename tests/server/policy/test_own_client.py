"""`phalanx.client` at a policy server without a gateway."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.client import PolicyClient
from phalanx.errors import InvalidRequestError, UnknownModelError
from phalanx.testing.policy import FakePolicyArgs, fake_actions
from tests.server.policy.running import seen, serving


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def test_it_gets_actions_and_health(server):
    observation = seen("go on")
    with PolicyClient(server.address, model="fake") as robot:
        actions = robot.act(observation.images, observation.state, "go on")
        assert robot.healthy()
    assert np.array_equal(actions, fake_actions(FakePolicyArgs(), observation)[0])


def test_errors_are_the_servers_words(server):
    with PolicyClient(server.address, model="fake") as robot:
        with pytest.raises(InvalidRequestError, match="camera 'top' is not one of the policy's"):
            robot.act({"top": np.zeros((4, 4, 3), np.uint8)})
    with PolicyClient(server.address, model="pi0") as robot:
        with pytest.raises(UnknownModelError, match="this server has 'fake'"):
            robot.act()
