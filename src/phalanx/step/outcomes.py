"""What a resource answers when it is asked for capacity: an outcome, never an exception."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AllocationFailed:
    """Too little room: free some (push a request back) and try again."""

    message: str
    pages_short: int
    request_id: str
    label: str = "main"


@dataclass(frozen=True)
class AdmitRuntimeError:
    """It can never work: the request must end. Without `request_id` all rows are concerned."""

    message: str
    request_id: str | None = None


@dataclass(frozen=True)
class RequestOffloading:
    """Its state is on the host, or on the way: bring it back and try again; others stay."""

    message: str
    request_id: str | None = None
    label: str = "main"


@dataclass(frozen=True)
class NotReady:
    """It waits for something outside (imported state): try again when that has come.

    Without `request_id` all rows are concerned.
    """

    message: str
    request_id: str | None = None


RefusalReason = AllocationFailed | AdmitRuntimeError | RequestOffloading | NotReady


@dataclass(frozen=True)
class AdmitOutcome:
    """`ok`: capacity is reserved. `ready`: imported state has landed (else ask again later)."""

    ok: bool = True
    ready: bool = True
    reason: RefusalReason | None = None


ADMITTED = AdmitOutcome()


@dataclass(frozen=True)
class StepOutcome:
    """The runner's answer for all resources of a step: the first refusal and who gave it."""

    outcome: AdmitOutcome = ADMITTED
    failed_resource: str | None = None

    @property
    def ok(self) -> bool:
        return self.outcome.ok
