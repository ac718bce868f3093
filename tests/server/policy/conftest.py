import pytest

from phalanx import Engine
from phalanx.testing.policy import FakePolicy, FakePolicyEntry


@pytest.fixture(scope="session", autouse=True)
def fake_policies() -> None:
    for plugin in (FakePolicy, FakePolicyEntry):
        if plugin.name not in Engine.registered():
            Engine.register(plugin)
