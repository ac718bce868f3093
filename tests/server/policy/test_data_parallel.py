"""Data parallelism over independent servers: four `phalanx serve` and a `phalanx-gateway`, each a
process started by its command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.server.policy.running import PolicyClient, seen
from tests.server.policy.serve_process import PHALANX, ServeProcess, started
from tests.server.test_control import until

COUNT = 4
CONFIG = """
plugin: fake_policy_entry
config: {device: {target: cpu}}
server: {model_name: pi05, port: 0}
"""


@contextmanager
def gateway_of(addresses: list[str]) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its HTTP URL and its gRPC address."""
    command = [PHALANX.with_name("phalanx-gateway"), "--gateway", "127.0.0.1:0", "--http-port", "0"]
    for address in addresses:
        command += ["--backend", "pi05", address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"(http://\S+) and gRPC at (\S+)", process.stdout.readline())
            assert found is not None
            yield process, found[1], found[2]
        finally:
            process.kill()
            process.communicate()


@pytest.mark.long
def test_r96_r97_r99_four_servers_compute_at_the_same_time_behind_one_address(installed, tmp_path):
    """Each server opens the FIFO of a request inside of its model, before any is let go."""
    config = tmp_path / "pi05.yaml"
    config.write_text(CONFIG)
    fifos = [tmp_path / f"fifo-{index}" for index in range(COUNT)]
    for fifo in fifos:
        os.mkfifo(fifo)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started(installed, str(config), CUDA_VISIBLE_DEVICES=str(index)))
            for index in range(COUNT)
        ]
        addresses = [ServeProcess(process).address for process in processes]
        assert len(set(addresses)) == COUNT
        gateway, url, address = stack.enter_context(gateway_of(addresses))
        with httpx.Client(base_url=url, verify=False) as http:
            until(
                lambda: all(one["healthy"] for one in http.get("/v1/backends").json()["backends"])
            )
        client = PolicyClient(address)
        stack.enter_context(client.channel)
        futures = [
            client.future(seen(f"fifo {fifo}"), model="pi05", request_id=fifo.name)
            for fifo in fifos
        ]
        with ExitStack() as held:
            for fifo in fifos:
                held.enter_context(fifo.open("wb"))
            assert not any(future.done() for future in futures)
        assert all(future.result() for future in futures)
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait() == 0
