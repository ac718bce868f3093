"""`phalanx serve` and `phalanx gateway` as processes, with the shipped configurations of Cosmos3."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests import forked
from tests.forked import Forked

PHALANX = Path(sys.executable).with_name("phalanx")
EXAMPLES = Path(__file__).parents[3] / "examples"
PLAIN = ("--set", "plugin_args.native_operators=off", "--port", "0")
"""For a server that builds nothing, at a free port."""
READY = re.compile(
    r"serving cosmos3 at (?P<url>http://\S+)"
    r"|at grpc://(?P<grpc>[^\s,;]+), HTTP and openpi at (?P<http>http://[^\s;]+)"
    r"|phalanx gateway: (?P<front>http://\S+) and gRPC at (?P<door>\S+)"
)


@contextmanager
def process(cache: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """Ready on entry, with the addresses that it says; killed on exit."""
    environment = {
        "PHALANX_DEVICE": "cpu",
        "PHALANX_NUM_THREADS": "1",
        "PHALANX_CACHE_DIR": str(cache),
    }
    running = Forked(forked.PHALANX, arguments, environment)
    try:
        line = running.stdout.readline()
        found = READY.search(line)
        assert found is not None, (line, running.ended())
        yield {name: at for name, at in found.groupdict().items() if at is not None}
    finally:
        running.send_signal(signal.SIGKILL)
        running.ended()


@contextmanager
def behind_a_gateway(cache: Path, model: str, endpoint: str) -> Iterator[dict[str, str]]:
    """A gateway whose one server is known to be ready."""
    backend = ("--backend", model, endpoint)
    ports = ("--http-port", "0", "--gateway", "127.0.0.1:0")
    with process(cache, "gateway", *backend, *ports) as gateway:
        with httpx.Client(base_url=gateway["front"], timeout=60) as client:
            pool = client.get("/v1/pool").json()
            while not all(one["state"] == "ready" for one in pool["servers"]):
                seen = {"epoch": pool["epoch"], "after": pool["revision"], "wait_s": 20}
                pool = client.get("/v1/pool", params=seen).json()
        yield gateway
