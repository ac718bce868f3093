"""The ledger against a simple model of it, with processes that die between and in their writes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from phalanx.device_ledger import DeviceLedger
from phalanx.device_ledger.processes import ProcessId
from phalanx.errors import SimulatedOutOfMemoryError
from tests.device_ledger.processes import FakeProcesses, KilledError, TornWrite

BUDGET = 10
DEVICES = st.integers(0, 1)
PIDS = st.integers(1, 3)
TAGS = st.sampled_from(["weights", "kv_cache"])


class LedgerMachine(RuleBasedStateMachine):
    """`held` is (device, pid, tag) -> bytes, and each pid is its newest process."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.path = Path(self.directory.name) / "devices"
        DeviceLedger.create(self.path, 2, BUDGET)
        self.processes = FakeProcesses()
        self.started = Counter()
        self.held: dict[tuple[int, int, str], int] = {}
        self.peaks = [0, 0]

    def teardown(self) -> None:
        self.directory.cleanup()

    def become(self, pid: int) -> None:
        self.processes.current = ProcessId(pid, self.started[pid])

    def ledger(self, write=os.pwrite) -> DeviceLedger:
        return DeviceLedger(self.path, self.processes, write)

    def total(self, device: int) -> int:
        return sum(held for (where, _, _), held in self.held.items() if where == device)

    @rule(device=DEVICES, pid=PIDS, tag=TAGS, num_bytes=st.integers(0, BUDGET + 1))
    def take(self, device, pid, tag, num_bytes):
        self.become(pid)
        before = self.held.get((device, pid, tag), 0)
        after = self.total(device) - before + num_bytes
        if num_bytes > before and after > BUDGET:
            with pytest.raises(SimulatedOutOfMemoryError):
                self.ledger().take(device, f"owner {pid}", tag, num_bytes)
            return
        self.ledger().take(device, f"owner {pid}", tag, num_bytes)
        self.held[device, pid, tag] = num_bytes
        self.peaks[device] = max(self.peaks[device], after)

    @rule(device=DEVICES, pid=PIDS, tag=TAGS)
    def give(self, device, pid, tag):
        self.become(pid)
        self.ledger().give(device, f"owner {pid}", tag)
        self.held.pop((device, pid, tag), None)

    @rule(pid=PIDS)
    def die(self, pid):
        self.processes.dead.add(ProcessId(pid, self.started[pid]))
        self.started[pid] += 1
        self.held = {key: held for key, held in self.held.items() if key[1] != pid}

    @rule(
        device=DEVICES,
        pid=PIDS,
        tag=TAGS,
        num_bytes=st.integers(0, BUDGET),
        written=st.integers(0, 400),
    )
    def die_while_writing(self, device, pid, tag, num_bytes, written):
        self.become(pid)
        ledger = self.ledger(TornWrite(written))
        after = self.total(device) - self.held.get((device, pid, tag), 0) + num_bytes
        try:
            ledger.take(device, f"owner {pid}", tag, num_bytes)
        except (KilledError, SimulatedOutOfMemoryError):
            pass
        # What it was about to reach may have been noted or not.
        found = self.ledger().peaks()[device]
        assert found in (self.peaks[device], max(self.peaks[device], after))
        self.peaks[device] = found
        self.die(pid)

    @invariant()
    def it_says_what_the_model_says(self):
        devices = self.ledger().devices()
        found = {(one.device, one.pid, one.tag): one.num_bytes for d in devices for one in d.held}
        assert found == {key: held for key, held in self.held.items() if held}
        assert [device.peak_bytes for device in devices] == self.peaks
        assert all(device.held_bytes <= BUDGET for device in devices)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("change", ["take", "grow", "give", "over the dead"])
def test_a_kill_at_any_byte_of_a_change_leaves_a_right_ledger(tmp_path, change):
    path = tmp_path / "devices"
    written = 0
    while True:
        path.unlink(missing_ok=True)
        DeviceLedger.create(path, 1, 100)
        processes = FakeProcesses()
        ledger = DeviceLedger(path, processes)
        other = processes.current = ProcessId(7, 1)
        ledger.take(0, "other", "weights", 30)
        if change == "over the dead":
            processes.current = ProcessId(8, 1)
            ledger.take(0, "dead", "weights", 60)
            processes.dead.add(processes.current)
        processes.current = ProcessId(9, 1)
        if change in ("grow", "give"):
            ledger.take(0, "killed", "weights", 10)
        torn = DeviceLedger(path, processes, TornWrite(written))
        try:
            if change == "give":
                torn.give(0, "killed", "weights")
            else:
                torn.take(0, "killed", "weights", 70)
        except KilledError:
            processes.dead.add(processes.current)
            processes.current = other
            assert [(one.pid, one.num_bytes) for one in ledger.held()] == [(7, 30)]
            peak = ledger.peaks()[0]
            assert peak in {"take": (30, 100), "grow": (40, 100), "give": (40,)}.get(
                change, (90, 100)
            )
            ledger.take(0, "other", "weights", 100)
            assert ledger.peaks() == (100,)
            written += 1
            continue
        assert written > (3 if change == "give" else 340)
        return
