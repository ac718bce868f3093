"""Runs one replica in worker processes: requests go to all of its ranks, one of them answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from phalanx.engine.executors.waiting import submit_and_wait
from phalanx.engine.registry import PluginClass
from phalanx.engine.replicas import idle
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.engine.sinks import CallerSink
from phalanx.engine.workers.messages import (
    Answer,
    Apply,
    Cancel,
    Events,
    Finished,
    PayloadRef,
    Ready,
)
from phalanx.engine.workers.packets import Descriptor
from phalanx.engine.workers.payload import encode_request
from phalanx.engine.workers.places import PlacedPayload, place_in_file
from phalanx.engine.workers.supervisor import WorkerSupervisor
from phalanx.errors import (
    EngineOverloadedError,
    EngineUnavailableError,
    InvalidRequestError,
)
from phalanx.plugin import BatchingEntry, Entry
from phalanx.schema.control import ControlAnswer, ControlOp, Question, ReplaceWeights
from phalanx.schema.events import Event, Failed, Final
from phalanx.schema.limits import Limits
from phalanx.schema.placement import WorkerPlacement
from phalanx.schema.statistics import LoopStatistics


@dataclass(eq=False)
class Sent:
    """A request that the workers have; its last event waits for ranks that have not finished."""

    live: LiveRequest
    unfinished: set[int]
    ending: Final | None = None


class MultiprocessExecutor:
    """One replica of workers that a shared supervisor looks after. `world` are those of this machine."""

    entry: Entry | BatchingEntry | None = None

    def __init__(
        self,
        replica_id: int,
        world: int,
        plugin: PluginClass,
        ready: Ready,
        requests: RequestTable,
        supervisor: WorkerSupervisor,
    ) -> None:
        """`ready` is what the rank that answers said."""
        self.limits: Limits = ready.limits
        self.loop_statistics: LoopStatistics | None = ready.statistics
        self._replica_id = replica_id
        self._plugin = plugin
        self._is_batching = issubclass(plugin, BatchingEntry)
        self._world = world
        self._requests = requests
        self._supervisor = supervisor
        self._lock = threading.Lock()
        self._sent: dict[int, Sent] = {}
        # Requests whose caller was interrupted while they were sent: what is said of them is void.
        self._abandoned: set[int] = set()
        self._answers: dict[int, Future[ControlAnswer]] = {}
        self._control_numbers = count()
        self._has_failed = False

    @property
    def pids(self) -> tuple[int, ...]:
        return self._supervisor.pids

    def step(self, live: LiveRequest, sink: CallerSink, request: Any) -> Any:
        self._refuse_on_workers_thread("step")
        return submit_and_wait(self, live, sink, request)

    def submit(self, live: LiveRequest, request: Any) -> None:
        # From here on its future is running, and cannot be cancelled.
        self._requests.claim(live)
        with self._lock:
            self._sent[live.number] = Sent(live, set(range(self._world)))
        try:
            num_bytes = self._supervisor.submit(self._replica_id, live.number, live.rid, request)
        except (InvalidRequestError, EngineOverloadedError):
            self._unsend(live)
            raise
        except EngineUnavailableError as error:
            self._unsend(live)
            self._requests.refuse(error)  # nobody may find the engine whole after this
            self._requests.end(live, Failed(live.rid, error))
            return
        except BaseException:  # interrupted, perhaps after some rank was sent the request
            with self._lock:
                self._abandoned.add(live.number)
            self._unsend(live)
            self._requests.reject(live)
            if self._is_batching:
                self._send(Cancel(live.number))
            raise
        self._requests.carried(live, request_bytes=num_bytes)
        if live.cancelled:  # before it was sent, when the workers did not know it
            self._send(Cancel(live.number))

    def cancel(self, live: LiveRequest) -> bool:
        if not self._is_batching:
            return False
        if not live.cancelled:
            live.cancelled = True
            return self._send(Cancel(live.number))
        return True

    def control(self, op: ControlOp | Question) -> Future[ControlAnswer]:
        if not self._is_batching:
            raise InvalidRequestError(
                f"plugin {self._plugin.name!r} answers one request at a time and takes no control "
                f"operations such as {type(op).__name__}",
                field="op",
            )
        self._refuse_on_workers_thread("control")
        whole: ControlOp | Question = op
        ref: PayloadRef | None = None
        files: Sequence[Descriptor] = ()
        if isinstance(op, ReplaceWeights):
            ref, files = _placed(op, self._world)
            op = msgspec.structs.replace(op, tensors={})
        answer: Future[ControlAnswer] = Future()
        with self._lock:
            has_failed = self._has_failed
            number = next(self._control_numbers)
            if not has_failed:
                self._answers[number] = answer
        if has_failed:
            answer.set_exception(self._requests.unavailable())
        elif not self._send(Apply(number, op, ref), files, whole):
            with self._lock:
                # Unless whoever failed the workers has taken and answered it.
                unanswered = self._answers.pop(number, None) is not None
            if unanswered:
                answer.set_exception(self._requests.unavailable())
        return answer

    def received(
        self,
        placement: WorkerPlacement,
        reply: Events | Finished | Answer,
        events: list[tuple[int, Event]],
    ) -> None:
        """What a worker of this replica said; on the supervisor's thread."""
        if self._has_failed:
            return  # nobody waits for it any more
        match reply:
            case Finished(number=number):
                sent = self._find(placement, number)
                if sent is not None:
                    self._finished(placement, number, sent)
            case Answer():
                self._answered(placement, reply)
            case Events(execution_s=execution_s, statistics=statistics):
                if statistics is not None:
                    self.loop_statistics = statistics
                if execution_s is None:
                    self._deliver(placement, reply, events)
                else:
                    self._executed(placement, reply, events, execution_s)

    def failed(self) -> None:
        """The workers are gone: nobody will answer any more."""
        with self._lock:
            self._has_failed = True
            if self.loop_statistics is not None:
                self.loop_statistics = idle(self.loop_statistics)
            answers = list(self._answers.values())
            self._answers.clear()
            self._sent.clear()
        for answer in answers:
            answer.set_exception(self._requests.unavailable())

    def close(self) -> None:
        """The workers are stopped by whoever looks after them."""

    def _deliver(
        self, placement: WorkerPlacement, reply: Events, events: list[tuple[int, Event]]
    ) -> None:
        """What happened to requests of a batching plugin, whose ranks agree on it."""
        known: list[Event] = []
        for number, event in events:
            sent = self._find(placement, number)
            if sent is None:
                continue
            if not known:
                self._requests.carried(sent.live, response_bytes=reply.payload.num_bytes)
            known.append(event)
            if isinstance(event, Final | Failed):
                self._forget(number)
        for live in self._requests.deliver(known):
            self.cancel(live)

    def _executed(
        self,
        placement: WorkerPlacement,
        reply: Events,
        answers: list[tuple[int, Any]],
        execution_s: float,
    ) -> None:
        """The output rank has answered a plain plugin's request."""
        ((number, output),) = answers
        sent = self._find(placement, number)
        if sent is None:
            return
        self._requests.schedule(sent.live, execution_s)
        self._requests.carried(sent.live, response_bytes=reply.payload.num_bytes)
        sent.ending = Final(sent.live.rid, output)
        self._finished(placement, number, sent)

    def _finished(self, placement: WorkerPlacement, number: int, sent: Sent) -> None:
        """A rank has finished a plain plugin's request, which ends when all ranks have."""
        if placement.replica_rank not in sent.unfinished:
            self._malformed(placement, f"it finished request {number} twice")
            return
        sent.unfinished.remove(placement.replica_rank)
        if sent.unfinished:
            return
        if sent.ending is None:
            self._malformed(placement, f"every rank finished request {number}, none answered it")
            return
        self._forget(number)
        self._requests.end(sent.live, sent.ending)

    def _answered(self, placement: WorkerPlacement, answer: Answer) -> None:
        with self._lock:
            future = self._answers.pop(answer.number, None)
        if future is None:
            self._malformed(placement, f"it answered operation {answer.number}, which is unknown")
        elif answer.refusal is not None:
            future.set_exception(answer.refusal.error())
        else:
            future.set_result(answer.outcome)

    def _send(
        self,
        command: Cancel | Apply,
        descriptors: Sequence[Descriptor] = (),
        whole: ControlOp | Question | None = None,
    ) -> bool:
        """False where the workers are gone."""
        try:
            self._supervisor.send(self._replica_id, command, descriptors, whole)
        except EngineUnavailableError:
            return False
        return True

    def _refuse_on_workers_thread(self, verb: str) -> None:
        if self._supervisor.is_current:
            raise InvalidRequestError(
                f"{verb}() waits for the workers and was called on the thread that hears them, in "
                "a future's callback; call it from another thread"
            )

    def _unsend(self, live: LiveRequest) -> None:
        with self._lock:
            self._sent.pop(live.number, None)

    def _find(self, placement: WorkerPlacement, number: int) -> Sent | None:
        """A request that this replica has. One that it never had fails the workers."""
        with self._lock:
            sent = self._sent.get(number)
            abandoned = number in self._abandoned
        if sent is None and not abandoned:
            self._malformed(placement, f"it spoke of request {number}, which it does not have")
        return sent

    def _forget(self, number: int) -> None:
        with self._lock:
            self._sent.pop(number, None)
        self._supervisor.completed(number)

    def _malformed(self, placement: WorkerPlacement, what: str) -> None:
        self._supervisor.fail(
            EngineUnavailableError(
                f"malformed response of worker {placement.worker_id} (replica "
                f"{placement.replica_id}, rank {placement.replica_rank}): {what}; create a new "
                "engine"
            )
        )


def _placed(op: ReplaceWeights, num_readers: int) -> PlacedPayload:
    """New weights where every rank of a replica finds them."""
    encoded = encode_request(dict(op.tensors), num_readers)
    try:
        return place_in_file(encoded)
    except OSError as error:
        raise EngineOverloadedError(
            f"new weights of {encoded.num_bytes} bytes cannot be sent to the workers now: {error}; "
            "send fewer at a time, or give the system more shared memory"
        ) from error
