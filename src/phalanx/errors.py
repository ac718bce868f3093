"""Every exception that Phalanx raises, classed by whose fault it is.

PhalanxError
|- InvalidInputError (ValueError)        the caller's: nothing was started
|  |- ConfigurationError                 an argument, a flag, a file or an environment variable
|  |  `- WrongTypeError (TypeError)       an argument that is not of the class that is asked for
|  |- CheckpointError                    weights or tokenizer files that cannot be used
|  `- InvalidRequestError                one request, refused before it was queued
|     |- MalformedRequestError           its body is not of the protocol's form
|     |- BodyTooLargeError               its body is larger than the server takes
|     |- UnknownModelError               it names a model that is not served here
|     `- WrongRequestTypeError (TypeError) it is not of the class that the plugin takes
|- MissingDependencyError (ImportError)  the installation's: an optional package is absent
|- RequestFailedError (RuntimeError)     one accepted request; the engine serves on
|  |- DeviceMemoryError                  an operation's: the device has no room for what it needs
|  |- CaptureMismatchError               its node declares another step than it said to capture
|  |- DeadlineExceededError (TimeoutError) there was no answer before the caller's deadline
|  `- StreamStalledError                 its reader took nothing for too long
|- WeightUpdateError (RuntimeError)      new weights: sent out of order, or incomplete; nothing changed
|- SimulatedOutOfMemoryError (MemoryError) a simulated device's: what is asked for does not fit
|- PhalanxDistError (RuntimeError)       the ranks of a replica: misused, not set up, or lost
|  `- UnknownGroupError (KeyError)       a group of ranks that the topology does not have
|- RoleOperationError (RuntimeError)     an operation on a role, as its manager was asked for it
|  |- RoleOperationRefusedError          not allowed in the state it is in; nothing has changed
|  `- RoleOperationFailedError           begun, and not completed on every replica
|- BatchError (RuntimeError)             a batch of samples that is scored later; nothing of it is published
|  |- ScoresMisalignedError              an answer that is not about the sample's tokens, or not whole
|  |- BatchStateError                    a step that is not the next one
|  `- SampleStoreError                   the store is full, in use, or holds what cannot be read
`- EngineUnavailableError (RuntimeError) the engine's: it is closed or can no longer serve
   |- EngineAsleepError                  it gave memory back; the request never started
   |- EngineOverloadedError              its queue is full; the request never started
   `- NoServerError                      a gateway has no server that is ready for the request
      `- RoleNotReadyError               the model of a role takes no requests now
"""

from __future__ import annotations

__all__ = [
    "BatchError",
    "BatchStateError",
    "BodyTooLargeError",
    "CaptureMismatchError",
    "CheckpointError",
    "ConfigurationError",
    "DeadlineExceededError",
    "DeviceMemoryError",
    "EngineAsleepError",
    "EngineOverloadedError",
    "EngineUnavailableError",
    "InvalidInputError",
    "InvalidRequestError",
    "MalformedRequestError",
    "MissingDependencyError",
    "NoServerError",
    "PhalanxDistError",
    "PhalanxError",
    "RequestFailedError",
    "RoleNotReadyError",
    "RoleOperationError",
    "RoleOperationFailedError",
    "RoleOperationRefusedError",
    "SampleStoreError",
    "ScoresMisalignedError",
    "SimulatedOutOfMemoryError",
    "StreamStalledError",
    "UnknownGroupError",
    "UnknownModelError",
    "WeightUpdateError",
    "WrongRequestTypeError",
    "WrongTypeError",
]


class PhalanxError(Exception):
    """Base of all errors of this package."""


class InvalidInputError(PhalanxError, ValueError):
    """Something the caller gave is wrong; nothing was started and nothing has changed."""


class ConfigurationError(InvalidInputError):
    """An argument, flag, configuration file or environment variable is wrong."""


class WrongTypeError(ConfigurationError, TypeError):
    """An argument is not an instance of the class that is asked for."""


class CheckpointError(InvalidInputError):
    """A checkpoint is missing, truncated, or of a kind that this plugin cannot load."""


class InvalidRequestError(InvalidInputError):
    """A request was refused before it was queued.

    `field` names the offending field in the request's own terms, or is empty where the request
    as a whole is at fault.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class MalformedRequestError(InvalidRequestError):
    """A request's body is not JSON, or has fields or types that the protocol does not know."""


class BodyTooLargeError(InvalidRequestError):
    """A request's body is larger than the server takes; it was not read whole."""


class UnknownModelError(InvalidRequestError):
    """A request names a model that is not served here."""


class WrongRequestTypeError(InvalidRequestError, TypeError):
    """A request is not of the class that the plugin takes, or that this method takes."""


class MissingDependencyError(PhalanxError, ImportError):
    """An optional package is needed; the message says how to install it."""


class RequestFailedError(PhalanxError, RuntimeError):
    """An accepted request failed inside the engine, which goes on serving others."""


class DeviceMemoryError(RequestFailedError):
    """The device has no room for what an operation on the engine needs; nothing has changed."""


class CaptureMismatchError(RequestFailedError):
    """A node's `capture_key` and `declare_step` disagree about the same rows: a fault of the node.

    Replaying would compute another step than the one that was planned.
    """


class DeadlineExceededError(RequestFailedError, TimeoutError):
    """The time that a client gave its request has passed; the request was cancelled."""


class StreamStalledError(RequestFailedError):
    """A stream was cancelled because its reader took nothing for the stall time-out."""


class WeightUpdateError(PhalanxError, RuntimeError):
    """A weight update is out of order or incomplete; the weights that are served are the old ones."""


class SimulatedOutOfMemoryError(PhalanxError, MemoryError):
    """A simulated device has no room for what a process wants to hold; it holds what it did before.

    The message says who holds how much.
    """


class PhalanxDistError(PhalanxError, RuntimeError):
    """Ranks cannot communicate as asked: a call is wrong, nothing is set up, or a rank is lost."""


class UnknownGroupError(PhalanxDistError, KeyError):
    """The topology has no group of ranks of this name; the message lists those it has."""

    def __str__(self) -> str:
        # A KeyError shows its message in quotation marks.
        return str(self.args[0])


class RoleOperationError(PhalanxError, RuntimeError):
    """A manager did not do what it was asked for a role."""


class RoleOperationRefusedError(RoleOperationError):
    """The role, or one of its replicas, is in a state that does not allow it; nothing has changed."""


class RoleOperationFailedError(RoleOperationError):
    """It was begun, and did not end well on every replica; the message names each, and why."""


class BatchError(PhalanxError, RuntimeError):
    """A batch of samples could not go on; what its store has is what it had before."""


class ScoresMisalignedError(BatchError):
    """Scores are missing, not finite, or of other tokens than the sample's."""


class BatchStateError(BatchError):
    """The batch is not where this step begins; the message says what comes first."""


class SampleStoreError(BatchError):
    """The store of samples is full, is in use by another process, or was damaged."""


class EngineUnavailableError(PhalanxError, RuntimeError):
    """The engine is closed, or has failed and can no longer serve."""


class EngineAsleepError(EngineUnavailableError):
    """The engine gave memory back, or waits for weights; the request was not started.

    Nothing wakes it but `control(Wake())` and new weights. `retry_after_s` is when it is worth
    sending the request again.
    """

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineOverloadedError(EngineUnavailableError):
    """The engine's queue is full; the request was not started and may be sent elsewhere."""


class NoServerError(EngineUnavailableError):
    """No server of the model is ready; the request was not started.

    `retry_after_s` is when it is worth sending it again.
    """

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RoleNotReadyError(NoServerError):
    """A model of a role takes no requests now; the request was not started.

    `model` and `state` are what it was meant for and what that does, None where the role has no
    model yet. `phase`, `revision` and `epoch` tell which snapshot of the role says so.
    """

    def __init__(  # noqa: PLR0913 - one parameter a fact that is told
        self,
        message: str,
        *,
        role: str,
        model: str | None = None,
        state: str | None = None,
        phase: str | None = None,
        revision: int = 0,
        epoch: str = "",
        retry_after_s: int = 1,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.role = role
        self.model = model
        self.state = state
        self.phase = phase
        self.revision = revision
        self.epoch = epoch
