"""The steps of entering a phase, in their order, and what undoes each where it fails."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Step:
    """`does` in words that follow "the job", as it is shown while it is under way. `compensation`:
    what follows where it fails, and what is true then.
    """

    name: str
    does: str
    compensation: str

    def saying(self, does: str) -> Step:
        """The same, with what exactly is waited for."""
        return replace(self, does=does)


BEGIN = Step(
    "begin",
    "writes down what it is asked for",
    "nothing was begun: 503, and everything is as before",
)
CLEAR = Step(
    "clear",
    "waits until roles have finished, and have given their memory back",
    "who holds nothing for certain has given its lease up; who may hold something keeps it: 503,"
    " no phase, blocked until somebody recovers",
)
TAKE = Step(
    "take",
    "takes the leases of the phase",
    "all of them or none were taken: 503, no phase, and nobody holds anything",
)
ACTIVATE = Step(
    "activate",
    "waits until roles have loaded, and serve",
    "every role of the phase is put to sleep again: where that is certain its lease is given up"
    " (503, no phase, may be tried again), else it is kept, and the job is blocked",
)
AWAIT = Step(
    "await",
    "waits until roles serve that take no turns",
    "as above. 503 after the `startup_timeout_s` of the role that is waited for, at once where it"
    " cannot come by itself, and when the job is asked to leave",
)
PUBLISH = Step(
    "publish",
    "tells everybody",
    "a gateway that does not answer is not waited for longer than two seconds",
)
END = Step(
    "end",
    "writes down that it is done",
    "503, though the phase is entered: asked for again, it is written down",
)
ENTERING = (BEGIN, CLEAR, TAKE, ACTIVATE, AWAIT, PUBLISH, END)
