"""The trainer as one who has devices by turns: its word, its process, and what a restart knows."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from phalanx.errors import ConfigurationError, RoleOperationRefusedError
from phalanx.roles.coordination.phase_operations import PhaseBusyError
from phalanx.roles.coordination.trainer import SystemProcesses
from phalanx.wire.phases import Holding
from tests.roles.coordination.case import PID, Phases, run


def test_d7_the_lease_ends_with_the_trainers_process():
    async def scenario():
        p = Phases()
        p.attach()
        await p.up_to("train")
        p.processes.end(PID)
        assert (p.holders, p.document.phase, p.document.trainer_id) == (set(), None, None)
        assert any(
            "'t' (pid 77) has ended" in words and words.startswith("trainer") for words in p.told()
        )
        assert {tenant.phase for tenant in p.tenants.values()} == {None}
        await p.enter("rollout", "2")

    run(scenario)


def test_a_trainer_that_attaches_anew_with_empty_hands_has_no_lease():
    async def scenario():
        p = Phases()
        p.attach()
        await p.up_to("train")
        p.attach(holds=True)
        assert p.holders == {"trainer"}
        p.attach(holds=False)
        assert (p.holders, p.document.phase) == (set(), None)
        await p.enter("train")
        assert p.holders == {"trainer"}

    run(scenario)


def test_a_trainer_that_comes_with_memory_gets_the_lease_where_nobody_has_one():
    async def scenario():
        p = Phases()
        p.attach(holds=True)
        assert p.holders == {"trainer"}
        with pytest.raises(RoleOperationRefusedError, match="must release them first"):
            await p.enter("rollout")
        p.release()
        await p.enter("rollout")
        with pytest.raises(RoleOperationRefusedError, match="which rollout holds"):
            p.attach(holds=True)
        assert p.document.trainer_holding is Holding.NOTHING

    run(scenario)


def test_there_is_one_trainer():
    async def scenario():
        p = Phases()
        p.attach()
        p.processes.start(78)
        with pytest.raises(RoleOperationRefusedError, match="'t' is attached and runs"):
            p.attach("other", pid=78)
        with pytest.raises(RoleOperationRefusedError, match="end that one first"):
            p.attach("t", pid=78)
        with pytest.raises(RoleOperationRefusedError, match=r"'t' \(elsewhere\) cannot be"):
            p.attach("t", pid=None)
        with pytest.raises(ConfigurationError, match="pid=99 is no process"):
            p.attach("t", pid=99)
        with pytest.raises(ConfigurationError, match="trainer_id="):
            p.attach("")
        with pytest.raises(RoleOperationRefusedError, match="'other' is not the trainer"):
            p.release("other")
        p.processes.end(PID)
        p.attach("other", pid=78)
        assert p.document.trainer_id == "other"

    run(scenario)


def test_a_trainer_elsewhere_is_free_on_its_own_word_or_on_somebodys():
    async def scenario():
        p = Phases()
        p.attach(pid=None)
        await p.up_to("train")
        with pytest.raises(RoleOperationRefusedError, match="nobody knows whether it runs"):
            p.attach("other", pid=None)
        await p.recover()
        assert p.holders == {"trainer"}, "nobody has said anything of it"
        await p.recover("trainer")
        assert (p.holders, p.document.phase) == (set(), None)
        p.attach("other", pid=None)

    run(scenario)


def test_the_lease_of_a_trainer_outlives_a_restart_as_long_as_its_process():
    async def scenario():
        p = Phases()
        p.attach()
        await p.up_to("train")
        await p.restart()
        assert (p.document.phase, p.document.batch, p.holders) == (None, "1", {"trainer"})
        assert p.document.trainer_holding is Holding.MEMORY
        with pytest.raises(RoleOperationRefusedError, match="must release them first"):
            await p.enter("rollout", "2")
        p.release()
        await p.enter("rollout", "2")

    run(scenario)


@pytest.mark.parametrize("again", [False, True])
def test_a_trainer_that_ended_meanwhile_has_no_lease_after_a_restart(again):
    async def scenario():
        p = Phases()
        p.attach()
        await p.up_to("train")
        await p.coordinator.close()
        p.processes.end(PID)
        if again:
            p.processes.start(PID)  # another process with the same number
        p.begin()
        assert (p.holders, p.document.trainer_id) == (set(), None)
        await p.enter("rollout", "2")

    run(scenario)


def test_nobody_knows_of_a_trainer_elsewhere_after_a_restart():
    async def scenario():
        p = Phases()
        p.attach(pid=None)
        await p.up_to("train")
        await p.restart()
        assert p.document.trainer_holding is Holding.UNKNOWN
        assert p.holders == {"trainer"}
        p.attach(pid=None, holds=False)
        await p.enter("train")

    run(scenario)


def test_a_trainer_cannot_come_with_memory_while_devices_change_hands():
    async def scenario():
        p = Phases()
        await p.enter("rollout")
        entering = await p.amid("activate genrm", p.enter("genrm"))
        with pytest.raises(PhaseBusyError, match="change hands"):
            p.attach(holds=True)
        p.attach()
        await entering
        assert p.holders == {"genrm"}

    run(scenario)


def test_a_release_while_its_phase_is_entered_again_ends_the_lease_only_after_that():
    async def scenario():
        p = Phases()
        p.attach()
        await p.up_to("train")
        entering = asyncio.create_task(p.enter("train"))
        await asyncio.sleep(0)
        p.release()
        assert p.holders == {"trainer"}
        await entering
        assert p.holders == {"trainer"}, "the answer has said that it may have memory there"

    run(scenario)


def test_real_processes_are_told_from_later_ones_and_their_end_is_heard():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)

    async def scenario():
        processes = SystemProcesses()
        assert processes.started(os.getpid()) == processes.started(os.getpid()) is not None
        ended = asyncio.Event()
        processes.watch(child.pid, ended.set)
        unwatched = asyncio.Event()
        processes.watch(child.pid, unwatched.set)()
        assert processes.started(child.pid) is not None
        child.stdin.close()
        await ended.wait()
        assert not unwatched.is_set()
        assert processes.started(child.pid) is None, "it has ended, and nobody has waited for it"
        child.wait()
        heard = asyncio.Event()
        processes.watch(child.pid, heard.set)
        await heard.wait()

    asyncio.run(scenario())


MAIN_THREAD_ENDS = """
import ctypes, os, sys, threading
def stay():
    main = f"/proc/self/task/{os.getpid()}/stat"
    while open(main).read().rpartition(")")[2].split()[0] != "Z":
        pass
    os.write(1, b"ended")
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=stay).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_holds_memory_until_its_last_thread_has_ended():
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", MAIN_THREAD_ENDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    async def scenario():
        processes, ended = SystemProcesses(), asyncio.Event()
        processes.watch(child.pid, ended.set)
        assert await asyncio.to_thread(child.stdout.read, 5) == b"ended"
        assert processes.started(child.pid) is not None
        assert not ended.is_set()
        child.stdin.close()
        await ended.wait()
        assert processes.started(child.pid) is None

    try:
        asyncio.run(scenario())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_thread_of_a_process_is_no_process():
    threads: list[int] = []
    go_on = threading.Event()
    named = threading.Event()

    def be_there() -> None:
        threads.append(threading.get_native_id())
        named.set()
        go_on.wait()

    thread = threading.Thread(target=be_there)
    thread.start()
    named.wait()
    try:
        assert SystemProcesses().started(threads[0]) is None
    finally:
        go_on.set()
        thread.join()
