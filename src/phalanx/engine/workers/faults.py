"""What can go wrong with a group of workers, as the error that everybody who waits is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.engine.workers.deadlines import Expired
from phalanx.engine.workers.messages import Crashed
from phalanx.engine.workers.worker import Stage, Worker, describe_status
from phalanx.errors import EngineUnavailableError


def ended(worker: Worker, status: int) -> EngineUnavailableError:
    """A worker's process ended unasked; `status` is negative for a signal."""
    text = f"{worker.name} {describe_status(status)} while {worker.stage.value}"
    if status > 0 and worker.stage is Stage.NEW:
        text += "; what it printed says why"
    return _failed(text, ChildProcessError(f"{worker.name} {describe_status(status)}"))


def disconnected(worker: Worker) -> EngineUnavailableError:
    """A worker closed its connection and lives."""
    text = f"{worker.name} closed its connection while {worker.stage.value}"
    return _failed(text, EOFError(text))


def crashed(worker: Worker, crash: Crashed, rid: str | None) -> EngineUnavailableError:
    """A worker said what raised in it; `rid` is the request's, if it was during one."""
    during = f", during request {rid!r}" if rid is not None else ""
    text = (
        f"{worker.name} failed while {crash.phase}{during}: {crash.error}\n\n"
        f"in the worker:\n{crash.traceback}"
    )
    return _failed(text.rstrip(), ChildProcessError(f"{worker.name}: {crash.error}"))


def malformed(worker: Worker, error: Exception) -> EngineUnavailableError:
    """A worker sent what is no message, or a message that has no place there."""
    return _failed(f"malformed response of {worker.name}: {error}", error)


def unhandled(worker: Worker, error: BaseException) -> EngineUnavailableError:
    """Handling a worker's reply raised."""
    return _failed(
        f"a response of {worker.name} could not be handled: {type(error).__name__}: {error}", error
    )


def not_launched(worker_id: int, error: BaseException) -> EngineUnavailableError:
    """A worker's process could not be created."""
    return _failed(f"worker {worker_id} could not be started: {error}", error)


def defect(error: BaseException) -> EngineUnavailableError:
    """The thread that looks after the workers raised, which it never should."""
    return _failed(f"internal error: {type(error).__name__}: {error}", error)


def not_ready(workers: Iterable[Worker], timeout_s: float) -> EngineUnavailableError:
    """The start took too long."""
    late = [worker for worker in workers if worker.stage is not Stage.READY]
    doing = "; ".join(f"{worker.name} is still {worker.stage.value}" for worker in late)
    text = (
        f"not every worker was ready within startup_timeout_s={timeout_s:g}: {doing}; raise "
        "WorkerSupervisorConfig(startup_timeout_s=...) if they need longer"
    )
    return _failed(text, TimeoutError(f"startup_timeout_s={timeout_s:g} is over"))


def expired(requests: Sequence[Expired], timeout_s: float) -> EngineUnavailableError:
    """Requests took too long; all of them are named."""
    named = ", ".join(f"{each.rid!r} ({each.elapsed_s:.3f} s)" for each in requests)
    text = (
        f"{len(requests)} request{'' if len(requests) == 1 else 's'} did not end within "
        f"execution_timeout_s={timeout_s:g} of submission, queueing included: {named}"
    )
    return _failed(text, TimeoutError(text))


def not_stopped(worker: Worker, timeout_s: float) -> EngineUnavailableError:
    """A worker had to be ended by force."""
    text = f"{worker.name} did not stop within shutdown_timeout_s={timeout_s:g} and was ended"
    return _failed(text, TimeoutError(text))


def _failed(text: str, cause: BaseException) -> EngineUnavailableError:
    error = EngineUnavailableError(
        f"the engine has failed and can no longer serve; create a new one. Reason: {text}"
    )
    error.__cause__ = cause
    return error
