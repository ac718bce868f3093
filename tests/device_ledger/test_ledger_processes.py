"""Several real processes on one ledger at once, some of which are killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter

import pytest

from phalanx.device_ledger import DeviceLedger

WORKER = """
import os, random, sys
from pathlib import Path
from phalanx.device_ledger import DeviceLedger
from phalanx.errors import SimulatedOutOfMemoryError

ledger, random = DeviceLedger(Path(sys.argv[1])), random.Random(int(sys.argv[2]))
rounds = int(sys.argv[3])
owner, num_refused = f"worker {sys.argv[2]}", 0
print("started", flush=True)
for _ in range(rounds):
    tag, amount = random.choice(["weights", "kv_cache"]), random.randint(1, 60)
    try:
        ledger.take(0, owner, tag, amount)
    except SimulatedOutOfMemoryError:
        num_refused += 1
    device = ledger.devices()[0]
    assert device.held_bytes <= device.budget_bytes, device
    assert device.held_bytes <= device.peak_bytes, device
    if random.random() < 0.6:
        ledger.give(0, owner, tag)
print("refused", num_refused, flush=True)
sys.stdin.readline()
"""


def started(path, seed: int, rounds: int) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", WORKER, str(path), str(seed), str(rounds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True)


def ended(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.wait()
    worker.stdin.close()
    worker.stdout.close()


def test_processes_at_once_never_hold_more_than_there_is(tmp_path):
    ledger = DeviceLedger.create(tmp_path / "devices", 1, 100)
    workers = [started(ledger.path, seed, 300) for seed in range(3)]
    try:
        refused = 0
        for worker in workers:
            assert worker.stdout.readline() == "started\n"
        for worker in workers:
            word, _, count = worker.stdout.readline().partition(" ")
            assert word == "refused"
            refused += int(count)
        assert refused > 0
        held = Counter(one.pid for one in ledger.held())
        assert set(held) <= {worker.pid for worker in workers}
        assert 60 < ledger.peaks()[0] <= 100
    finally:
        for worker in workers:
            ended(worker)
    assert ledger.held() == ()


@pytest.mark.parametrize(
    "kills", [6, pytest.param(40, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_a_kill_at_any_moment_frees_what_was_held(tmp_path, kills):
    ledger = DeviceLedger.create(tmp_path / "devices", 1, 100)
    chosen = random.Random(7)
    for seed in range(kills):
        worker = started(ledger.path, seed, 1_000_000)
        try:
            assert worker.stdout.readline() == "started\n"
            # Some way into its rounds: each look here waits for the lock that it takes.
            for _ in range(chosen.randrange(40)):
                assert {one.pid for one in ledger.held()} <= {worker.pid}
            os.kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            assert ledger.held() == ()
            ledger.take(0, "this", "weights", 100)
            ledger.give(0, "this", "weights")
        finally:
            ended(worker)
