from pathlib import Path

import pytest

from phalanx import Engine
from phalanx.testing.policy import FakePolicy, FakePolicyEntry


@pytest.fixture(scope="session", autouse=True)
def fake_policies() -> None:
    for plugin in (FakePolicy, FakePolicyEntry):
        if plugin.name not in Engine.registered():
            Engine.register(plugin)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes the fake policies plugins of every process that has it on its path."""
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "fake_policy-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake_policy\nVersion: 1\n")
    lines = [
        f"{plugin.name} = {plugin.__module__}:{plugin.__name__}"
        for plugin in (FakePolicy, FakePolicyEntry)
    ]
    (info / "entry_points.txt").write_text("\n".join(["[phalanx.models]", *lines]))
    return folder
