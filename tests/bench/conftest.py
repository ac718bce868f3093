from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from phalanx.bench.systems import WORKERS
from phalanx.bench.worker_process import WorkerProcess

FAKE = Path(__file__).parent / "fake_worker.py"


@pytest.fixture
def protocol_path(monkeypatch):
    """Lets the fake worker, which lies elsewhere, import the protocol."""
    monkeypatch.setenv("PYTHONPATH", str(WORKERS))


@pytest.fixture
def worker(tmp_path, protocol_path):
    log = tmp_path / "fake.log"
    with WorkerProcess("fake", [sys.executable, str(FAKE)], dict(os.environ), log) as process:
        yield process
