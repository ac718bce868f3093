"""A process that has workers, for tests that end it: `python -m tests.engine.workers.parent`.

Arguments: what it does, then announce pipes of its workers (one each), then a gate that nobody
opens. It prints a line when it is where it was sent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from phalanx.testing.worker_runtimes import Deed, Misdeed, Phase
from tests.engine.workers.supervised import supervise

REQUEST_PHASES = ("executing", "replying")


def hold(phase: str, announces: list[str], gate: str) -> None:
    """Keep every worker in this phase, for ever."""
    misdeeds = [
        Misdeed(Phase(phase), Deed.WAIT, worker_id=worker_id, announce=announce, gate=gate)
        for worker_id, announce in enumerate(announces)
        if phase != "spawning"
    ]
    in_request = phase in REQUEST_PHASES
    supervisor = supervise([] if in_request else misdeeds, shape={"replicas": len(announces)})
    supervisor.start()
    if in_request:
        for replica_id, misdeed in enumerate(misdeeds):
            supervisor.submit(replica_id, replica_id, str(replica_id), misdeed)
    elif phase == "receiving":
        for replica_id in range(len(announces)):
            supervisor.submit(replica_id, replica_id, str(replica_id), bytes(1_000_000))
    elif phase == "stopping":
        supervisor.close()
    threading.Event().wait()


def hold_with_copy(announces: list[str], gate: str) -> None:
    """Hold a worker before its first line, and leave a copy of this process with its sockets."""
    supervisor = supervise(shape={"replicas": len(announces)})
    threading.Thread(target=supervisor.start, daemon=True).start()
    while not supervisor.pids:
        os.sched_yield()
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    print("copied", flush=True)
    threading.Event().wait()


def leave(how: str, announces: list[str]) -> None:
    """Start workers, and leave without closing them."""
    misdeeds = [
        Misdeed(Phase.STOPPING, Deed.ANNOUNCE, worker_id=worker_id, announce=announce)
        for worker_id, announce in enumerate(announces)
    ]
    supervisor = supervise(misdeeds, shape={"replicas": len(announces)})
    supervisor.start()
    interrupted = threading.Event()
    if how == "interrupt":  # before it is told that it may come
        signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    print(*supervisor.pids, flush=True)
    match how:
        case "return":
            pass
        case "raise":
            raise RuntimeError("as asked")
        case "exit":
            sys.exit(5)
        case "os._exit":
            os._exit(6)
        case "fork":
            # The copy has no thread that could close or let go of the lock.
            supervisor._lock.acquire()
            if os.fork() == 0:
                sys.exit(7)
            supervisor._lock.release()
            os.wait()
            supervisor.submit(0, 1, "a", "b")
            print(supervisor.state, flush=True)
        case "interrupt":
            interrupted.wait()
            supervisor.close()
            print(supervisor.state, supervisor.failure, flush=True)


if __name__ == "__main__":
    what, how, *pipes = sys.argv[1:]
    if what == "hold" and how == "copied":
        hold_with_copy(pipes[:-1], pipes[-1])
    elif what == "hold":
        hold(how, pipes[:-1], pipes[-1])
    else:
        leave(how, pipes)
