"""Processes with sessions of their own: how they end, by themselves and by others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles import lifeline
from phalanx.roles.child_process import Command, ProcessHost, last_lines
from tests.roles.launching.processes import (
    DEAF,
    FOREVER,
    PATH,
    WITH_CHILD,
    Fifo,
    has_ended,
    python,
    wait_for_end,
    watched,
)


@pytest.fixture
def fifo(tmp_path) -> Fifo:
    return Fifo(tmp_path / "said")


async def started(host: ProcessHost, program: str, fifo: Fifo):
    """The child and what it says when it has come so far."""
    child = host.start(python(program, fifo.path), fifo.path.with_name("child.log"))
    return child, await asyncio.to_thread(fifo.read)


def test_its_end_is_told_with_the_end_of_its_log(tmp_path):
    async def main() -> str:
        host = ProcessHost()
        command = python("print('one'); print('two', flush=True); sys.exit(3)")
        child = host.start(command, tmp_path / "deep" / "child.log")
        how = await child.exited()
        await host.close(1)
        return how

    how = asyncio.run(main())
    assert how.startswith("it ended with status 3; its log ")
    assert how.endswith("ends with:\n  one\n  two")


def test_a_killed_one_is_noticed_with_its_signal(fifo):
    async def main() -> str:
        host = ProcessHost()
        child, _ = await started(host, FOREVER, fifo)
        os.kill(child.pid, signal.SIGKILL)
        how = await child.exited()
        await host.close(1)
        return how

    assert asyncio.run(main()).startswith("it was killed by SIGKILL; its log ")


def test_only_its_own_start_is_told_of_a_log_that_goes_on(tmp_path):
    log = tmp_path / "child.log"
    log.write_text("of an earlier start\n")

    async def main() -> str:
        host = ProcessHost()
        child = host.start(python("sys.exit(1)"), log)
        how = await child.exited()
        await host.close(1)
        return how

    assert asyncio.run(main()).endswith("child.log is empty")
    assert log.read_text().startswith("of an earlier start\n")


def test_stop_asks_first_and_gives_it_its_time(tmp_path, fifo):
    program = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # whenever it comes, it is waited for
say('ready')
signal.sigwait({signal.SIGTERM})
say('asked')
with open(sys.argv[2]) as go: go.read()
print('ended in order', flush=True)
"""
    go = Fifo(tmp_path / "go")

    async def main() -> None:
        host = ProcessHost()
        child = host.start(python(program, fifo.path, go.path), tmp_path / "child.log")
        assert await asyncio.to_thread(fifo.read) == "ready"
        stopping = asyncio.create_task(child.stop(600))
        assert await asyncio.to_thread(fifo.read) == "asked"
        assert not stopping.done()
        await asyncio.to_thread(go.path.write_text, "go")
        await stopping
        await host.close(1)

    asyncio.run(main())
    assert last_lines(tmp_path / "child.log")[-1] == "ended in order"


@pytest.mark.parametrize("grace_s", [0, 0.01])
def test_stop_kills_what_does_not_listen(fifo, grace_s):
    async def main() -> None:
        host = ProcessHost()
        child, pid = await started(host, DEAF, fifo)
        with watched(int(pid)) as (end,):
            await child.stop(grace_s)
            assert has_ended(end)
        await host.close(1)

    asyncio.run(main())


def test_stop_kills_one_that_was_stopped_by_a_signal(fifo):
    async def main() -> None:
        host = ProcessHost()
        child, pid = await started(host, FOREVER, fifo)
        os.kill(int(pid), signal.SIGSTOP)
        with watched(int(pid)) as (end,):
            await child.stop(0.01)
            assert has_ended(end)
        await host.close(1)

    asyncio.run(main())


def test_stop_returns_when_every_process_of_it_is_gone(fifo):
    async def main() -> None:
        host = ProcessHost()
        child, pids = await started(host, WITH_CHILD, fifo)
        with watched(*map(int, pids.split())) as ends:
            assert len(lifeline.members(child.pid)) == 2
            await child.stop(60)
            assert all(map(has_ended, ends))
        await host.close(1)

    asyncio.run(main())


def test_when_it_dies_what_it_started_goes_too(fifo):
    async def main() -> None:
        host = ProcessHost()
        child, pids = await started(host, WITH_CHILD, fifo)
        with watched(*map(int, pids.split())) as ends:
            os.kill(child.pid, signal.SIGKILL)
            await child.exited()
            await child.gone()
            assert all(map(has_ended, ends))
        await host.close(1)

    asyncio.run(main())


def test_a_stop_is_no_end_by_itself(fifo):
    async def main() -> None:
        host = ProcessHost()
        child, _ = await started(host, FOREVER, fifo)
        exited = asyncio.create_task(child.exited())
        await asyncio.gather(child.stop(60), child.stop(60))
        await child.stop(60)
        assert not exited.done()
        exited.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await exited
        await host.close(1)
        await host.close(1)

    asyncio.run(main())


def test_close_stops_what_runs_and_what_it_holds_is_let_go_of(tmp_path, fifo):
    async def main() -> None:
        host = ProcessHost()
        held = contextlib.ExitStack()
        released = asyncio.Event()
        held.callback(released.set)
        child = host.start(python(FOREVER, fifo.path), tmp_path / "child.log", holds=held)
        pid = await asyncio.to_thread(fifo.read)
        with watched(int(pid), child.pid) as ends:
            assert not released.is_set()
            await host.close(60)
            assert all(map(has_ended, ends))
        assert released.is_set()

    asyncio.run(main())


PARENT = """
import asyncio, sys
from pathlib import Path
from phalanx.roles.child_process import ProcessHost
from tests.roles.launching import processes

async def main():
    host = ProcessHost()
    program = getattr(processes, sys.argv[1])
    host.start(processes.python(program, sys.argv[2]), Path(sys.argv[3]))
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.contextmanager
def parent_of(program: str, fifo: Fifo):
    """A process that has started one of `processes`, and the numbers that this one has said."""
    log = fifo.path.with_name("child.log")
    command = [sys.executable, "-c", PARENT, program, fifo.path, log]
    with subprocess.Popen(command, cwd=Path(__file__).parents[3]) as parent:
        try:
            yield parent, [int(pid) for pid in fifo.read().split()]
        finally:
            parent.kill()


def test_nothing_outlives_a_parent_that_is_killed(fifo):
    with parent_of("WITH_CHILD", fifo) as (parent, pids), watched(*pids) as ends:
        parent.kill()
        wait_for_end(ends)


def test_the_kernel_ends_it_with_its_parent_though_nobody_guards_it(fifo):
    with parent_of("FOREVER", fifo) as (parent, pids), watched(*pids) as ends:
        guards = set(children_of(parent.pid)) - set(pids)
        assert len(guards) == 1
        with watched(*guards) as guard_ends:
            os.kill(guards.pop(), signal.SIGKILL)
            wait_for_end(guard_ends)
        parent.kill()
        wait_for_end(ends)


@pytest.mark.parametrize(
    ("parent", "program", "why"),
    [
        ("somebody else", "true", "the process that started this one is gone"),
        ("this one", "/nowhere/x", "cannot run /nowhere/x: No such file"),
    ],
)
def test_what_cannot_be_run_says_so(parent, program, why):
    number = os.getpid() if parent == "this one" else 1
    command = [sys.executable, "-I", "-S", lifeline.__file__, "run", str(number), program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and why in ended.stderr


def test_a_guard_that_was_killed_is_replaced(tmp_path):
    async def main() -> None:
        others = set(children_of(os.getpid()))  # those of other files' fixtures
        host = ProcessHost()
        fifos = [Fifo(tmp_path / name) for name in "ab"]
        first, _ = await started(host, FOREVER, fifos[0])
        guards = set(children_of(os.getpid())) - others - {first.pid}
        with watched(*guards) as ends:
            for guard in guards:
                os.kill(guard, signal.SIGKILL)
            wait_for_end(ends)
        second, _ = await started(host, FOREVER, fifos[1])
        again = set(children_of(os.getpid())) - others - {first.pid, second.pid}
        assert len(again) == 1 and not again.intersection(guards)
        await host.close(60)

    asyncio.run(main())


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_a_program_that_is_not_there_is_refused(tmp_path):
    command = Command(("/nowhere/python", "-m", "sglang"), PATH)
    with pytest.raises(ConfigurationError, match=r"no program '/nowhere/python'.*give the path"):
        ProcessHost().start(command, tmp_path / "child.log")


def test_a_log_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()

    async def main() -> None:
        host = ProcessHost()
        try:
            with pytest.raises(ConfigurationError, match="cannot write the log .*/file/child.log"):
                host.start(python("pass"), tmp_path / "file" / "child.log")
        finally:
            await host.close(0)

    asyncio.run(main())


def test_the_log_shows_the_command_without_its_secrets():
    command = Command(("serve", "--api-key", "s1", "--set", "server.api_key=s2", "--tp", "2"), {})
    assert command.shown() == "serve --api-key '(set)' --set 'server.api_key=(set)' --tp 2"
