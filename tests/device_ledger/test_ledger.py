"""One ledger as a single process sees it: budgets, refusals, peaks, files."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

from phalanx.device_ledger import MIB, DeviceLedger, Holding
from phalanx.device_ledger.ledger_file import ENTRIES_PER_DEVICE, make_ledger_file
from phalanx.device_ledger.processes import LinuxProcesses, ProcessId
from phalanx.errors import ConfigurationError, PhalanxError, SimulatedOutOfMemoryError
from tests.device_ledger.processes import FakeProcesses


@pytest.fixture
def ledger(tmp_path):
    return DeviceLedger.create(tmp_path / "run" / "devices", 2, 100)


def test_what_is_taken_is_held_until_it_is_given(ledger):
    ledger.take(0, "rollout/student/0", "weights", 60)
    ledger.take(1, "rollout/student/0", "weights", 70)
    ledger.take(0, "rollout/student/0", "kv_cache", 40)
    assert ledger.held() == (
        Holding(0, "rollout/student/0", "weights", 60, os.getpid()),
        Holding(0, "rollout/student/0", "kv_cache", 40, os.getpid()),
        Holding(1, "rollout/student/0", "weights", 70, os.getpid()),
    )
    for _ in range(2):
        ledger.give(0, "rollout/student/0", "weights")
    assert [device.held_bytes for device in ledger.devices()] == [40, 70]
    assert ledger.peaks() == (100, 70)


def test_what_does_not_fit_is_refused_with_who_holds_what(tmp_path):
    ledger = DeviceLedger.create(tmp_path / "devices", 1, 1500 * MIB)
    ledger.take(0, "rollout/student/0", "weights", 900 * MIB)
    ledger.take(0, "rollout/student/0", "kv_cache", 100 * MIB)
    with pytest.raises(SimulatedOutOfMemoryError) as caught:
        ledger.take(0, "teacher/big/0", "weights", 600 * MIB)
    pid = os.getpid()
    assert str(caught.value) == (
        f"simulated device 0 is out of memory: teacher/big/0 (pid {pid}) tried to take 600.0 MiB for"
        " weights; of 1500.0 MiB 500.0 MiB are free, and rollout/student/0"
        f" (pid {pid}) holds 900.0 MiB for weights and 100.0 MiB for kv_cache; let it take less"
        " (a KV cache has the size of pool_tokens), or give the devices more"
        " (placement.device_memory_mib)"
    )
    assert isinstance(caught.value, PhalanxError) and isinstance(caught.value, MemoryError)
    assert len(ledger.held()) == 2 and ledger.peaks() == (1000 * MIB,)


def test_the_last_byte_fits_and_the_next_one_does_not(ledger):
    ledger.take(0, "a", "weights", 100)
    with pytest.raises(SimulatedOutOfMemoryError, match="0 bytes are free"):
        ledger.take(0, "b", "weights", 1)
    ledger.give(0, "a", "weights")
    with pytest.raises(SimulatedOutOfMemoryError, match="nobody holds any"):
        ledger.take(0, "b", "weights", 101)


def test_an_amount_replaces_the_one_before_under_its_tag(ledger):
    ledger.take(0, "a", "weights", 90)
    ledger.take(0, "a", "weights", 95)
    with pytest.raises(SimulatedOutOfMemoryError):
        ledger.take(0, "a", "weights", 101)
    assert [holding.num_bytes for holding in ledger.held()] == [95]
    ledger.take(0, "a", "weights", 10)
    ledger.take(0, "a", "weights", 0)
    assert ledger.held() == ()
    assert ledger.peaks() == (95, 0)


def test_entries_of_the_dead_do_not_count(tmp_path):
    path, processes = tmp_path / "devices", FakeProcesses()
    DeviceLedger.create(path, 1, 100)
    ledger = DeviceLedger(path, processes)
    ledger.take(0, "a", "weights", 90)
    processes.dead.add(processes.current)
    assert ledger.held() == ()
    # The same pid again, and the same name.
    processes.current = ProcessId(processes.current.pid, 2)
    ledger.take(0, "a", "weights", 80)
    assert [holding.num_bytes for holding in ledger.held()] == [80]
    assert ledger.peaks() == (90,)


def test_places_of_the_dead_are_used_again_and_those_of_the_living_are_bounded(tmp_path):
    path, processes = tmp_path / "devices", FakeProcesses()
    DeviceLedger.create(path, 1, 100)
    ledger = DeviceLedger(path, processes)
    for _ in range(3):
        processes.current = ProcessId(processes.current.pid + 1, 1)
        for at in range(ENTRIES_PER_DEVICE):
            ledger.take(0, "a", f"tag {at}", 1)
        with pytest.raises(SimulatedOutOfMemoryError, match="no place for one more"):
            ledger.take(0, "a", "another", 1)
        processes.dead.add(processes.current)
    assert ledger.held() == ()


def test_a_process_that_has_ended_is_dead_before_anybody_waits_for_it():
    processes = LinuxProcesses()
    own = processes.own()
    assert processes.is_alive(own)
    assert not processes.is_alive(ProcessId(own.pid, own.started + 1))
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        # Field 22 of its line, after a name without blanks.
        with open(f"/proc/{child.pid}/stat") as file:
            found = ProcessId(child.pid, int(file.read().split()[21]))
        assert processes.is_alive(found)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not processes.is_alive(found)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
    assert not processes.is_alive(found)


def test_a_ledger_that_agrees_is_kept(ledger):
    ledger.take(0, "a", "weights", 60)
    again = DeviceLedger.create(ledger.path, 2, 100)
    assert again.held() == ledger.held() and again.peaks() == (60, 0)
    with pytest.raises(ConfigurationError, match="holds 60 bytes for weights; end what holds it"):
        DeviceLedger.create(ledger.path, 2, 200)
    ledger.give(0, "a", "weights")
    assert DeviceLedger.create(ledger.path, 2, 100).peaks() == (0, 0)
    assert DeviceLedger.create(ledger.path, 3, 200).devices()[2].budget_bytes == 200


@pytest.mark.parametrize("content", [b"", b"notes", bytes(20_000)])
def test_another_file_is_neither_read_nor_replaced(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for make in (DeviceLedger, lambda path: DeviceLedger.create(path, 1, 1)):
        with pytest.raises(ConfigurationError, match="is no ledger of devices"):
            make(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda ledger: ledger.take(2, "a", "weights", 1), "simulated device 2 is not one of"),
        (lambda ledger: ledger.give(-1, "a", "weights"), "which has 2, numbered from 0"),
        (lambda ledger: ledger.take(0, "a", "weights", -1), "num_bytes=-1 of 'weights'"),
        (lambda ledger: ledger.take(0, "", "weights", 1), "owner='' must have from 1 to 256"),
        (lambda ledger: ledger.take(0, "a", "t" * 65, 1), "tag='ttt"),
        (lambda ledger: DeviceLedger.create(ledger.path, 0, 1), "num_devices=0"),
        (lambda ledger: DeviceLedger.create(ledger.path, 1, 0), "budget_bytes=0"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(ledger, call, told):
    with pytest.raises(ConfigurationError, match=told):
        call(ledger)


def test_a_process_has_the_devices_that_its_environment_names(ledger, monkeypatch):
    assert DeviceLedger.from_environment() == ()
    monkeypatch.setenv("PHALANX_SIMULATED_DEVICES", f"{ledger.path}:1,0@rollout/student/0")
    first, second = DeviceLedger.from_environment()
    assert (first.number, second.number) == (1, 0)
    with first.holding("weights", 30):
        assert ledger.held() == (Holding(1, "rollout/student/0", "weights", 30, os.getpid()),)
    assert ledger.held() == ()
    assert DeviceLedger.from_environment("trainer")[0].owner == "trainer"
    monkeypatch.setenv("PHALANX_SIMULATED_DEVICES", f"{ledger.path}:0")
    assert DeviceLedger.from_environment()[0].owner == f"process {os.getpid()}"
    monkeypatch.setenv("PHALANX_SIMULATED_DEVICES", f"{ledger.path}:2")
    with pytest.raises(ConfigurationError, match="simulated device 2 is not one of"):
        DeviceLedger.from_environment()


@pytest.mark.parametrize("value", ["/a", "/a:", "/a:0,", "/a:0,0", "/a:x", "/a:0@", ":0"])
def test_a_variable_that_cannot_be_read_is_refused(monkeypatch, value):
    monkeypatch.setenv("PHALANX_SIMULATED_DEVICES", value)
    with pytest.raises(ConfigurationError, match="FILE:N,N"):
        DeviceLedger.from_environment()


def test_a_child_that_was_forked_in_the_middle_of_a_change_keeps_nobody_out(ledger):
    """It has the locked file too, for as long as it lives."""
    reading, writing = os.pipe()
    with ledger._file.opened():
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        with ledger.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_a_ledger_that_another_has_just_made_is_not_replaced(tmp_path):
    """Two that saw none and make it at once have one ledger."""
    path = tmp_path / "devices"
    DeviceLedger.create(path, 1, 100).take(0, "first", "weights", 60)
    make_ledger_file(path, 1, 100)
    with pytest.raises(SimulatedOutOfMemoryError, match="first"):
        DeviceLedger(path).take(0, "second", "weights", 60)
    assert [one.name for one in tmp_path.iterdir()] == ["devices"]


def test_a_file_that_is_gone_under_a_running_job_is_told(ledger):
    ledger.take(0, "student", "weights", 60)
    ledger.path.unlink()
    with pytest.raises(ConfigurationError, match="cannot open"):
        ledger.take(1, "student", "weights", 60)
