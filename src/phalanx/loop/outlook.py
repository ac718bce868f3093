"""What a request will want after the step that is being computed, as far as it can say before."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

from phalanx.loop.request import Work


class Outlook(enum.Enum):
    """What is foreseen where it is not more work."""

    ENDS = "ends"
    """The request wants nothing more."""
    UNKNOWN = "unknown"
    """That depends on what the step gives."""


class Foreseeing(ABC):
    """A request's state whose next step may be prepared while the present one is computed."""

    @abstractmethod
    def work_after(self, span: int) -> Work | Outlook:
        """What `next_work` will most likely answer when a step of `span` tokens is accounted for.

        Changes nothing; what it raises ends the request. Where it proves wrong, a step of this request was computed for nothing.
        """
