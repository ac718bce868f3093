from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.rl.models import serving, write_llama
from tests.server.running import RunningServer


@pytest.fixture(scope="session")
def first_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("first"), 1)


@pytest.fixture(scope="session")
def second_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shapes as `first_dir`, with other weights."""
    return write_llama(tmp_path_factory.mktemp("second"), 2)


@pytest.fixture
def server(first_dir: Path) -> Iterator[RunningServer]:
    """A fresh one for each test: what a trainer does to it stays."""
    with serving(first_dir) as running_server:
        yield running_server


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as executor:
        yield executor
