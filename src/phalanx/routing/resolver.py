"""Which servers may get a request: a pure function of a snapshot, the same for everyone who asks."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import NoServerError, UnknownModelError
from phalanx.routing.endpoint import Scheme
from phalanx.routing.snapshot import Server, ServerState, Snapshot

RETRY_AFTER_S = 1


@dataclass(frozen=True)
class Selector:
    """What a request says of where it wants to go. `model` None: the only model of the scheme."""

    scheme: Scheme
    model: str | None = None


def resolve(snapshot: Snapshot, selector: Selector) -> tuple[Server, ...]:
    """The servers that may get the request, at least one, in the order of their registration.

    Raises `UnknownModelError` where no server of the model is registered, and `NoServerError` where
    none of those that are is ready.
    """
    model = selector.model
    if model is None:
        model = _only_model(snapshot, selector.scheme)
    candidates = snapshot.ready.get((model, selector.scheme))
    if candidates:
        return candidates
    waiting = [
        server
        for server in snapshot.servers
        if server.model_name == model and server.endpoint.scheme is selector.scheme
    ]
    if waiting:
        raise NoServerError(
            f"no server of model {model!r} is ready: {_states(waiting)}; send the request again"
            " later",
            retry_after_s=RETRY_AFTER_S,
        )
    raise UnknownModelError(_unknown(snapshot, model, selector.scheme), field="model")


def models(snapshot: Snapshot, scheme: Scheme) -> tuple[str, ...]:
    """The names of the models that servers of `scheme` are registered for."""
    return tuple(sorted(name for name, spoken in snapshot.serving if spoken is scheme))


def _only_model(snapshot: Snapshot, scheme: Scheme) -> str:
    names = models(snapshot, scheme)
    if len(names) == 1:
        return names[0]
    if not names:
        # A caller that names no model means whichever is there; servers may still register.
        raise NoServerError(
            f"no {_spoken(scheme)} server is registered; start one, or register it with"
            " --backend MODEL ENDPOINT or POST /v1/backends",
            retry_after_s=RETRY_AFTER_S,
        )
    raise UnknownModelError(
        f"the request names no model, and there are several: {_listed(names)}; name one",
        field="model",
    )


def _unknown(snapshot: Snapshot, model: str, scheme: Scheme) -> str:
    names = models(snapshot, scheme)
    known = f"known: {_listed(names)}" if names else f"no {_spoken(scheme)} server is registered"
    if any(name == model for name, _ in snapshot.serving):
        other = Scheme.HTTP if scheme is Scheme.GRPC else Scheme.GRPC
        return (
            f"model {model!r} is served over {_spoken(other)} here, not {_spoken(scheme)}; {known}"
        )
    return f"model {model!r} is not served here; {known}"


def _states(servers: list[Server]) -> str:
    counts = {
        state: num
        for state in ServerState
        if (num := sum(server.state is state for server in servers))
    }
    listed = ", ".join(f"{num} {state}" for state, num in counts.items())
    # Callers are told why, not where: addresses of servers are for operators.
    details = [server.detail for server in servers if server.detail]
    return f"{listed} ({details[0]})" if details else listed


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _spoken(scheme: Scheme) -> str:
    return "gRPC" if scheme is Scheme.GRPC else "HTTP"
