"""Which model and which replicas may get a request of a role: pure functions of a snapshot, the same
for its gateway and for direct clients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from phalanx.errors import RoleNotReadyError, UnknownModelError
from phalanx.routing.roles.snapshot import (
    ReplicaState,
    RoleContent,
    RoleModel,
    RoleReplica,
    RoleSnapshot,
)
from phalanx.schema.roles import RouteMode, UnmappedRouteKey, WorkerType

RETRY_AFTER_S = 1
LONG_RETRY_AFTER_S = 5
"""For what takes longer than a moment: an engine that sleeps, loads or has to be started again."""
_MAX_LISTED = 8
_READY, _BY_ROUTER = ReplicaState.READY, RouteMode.SGLANG_ROUTER
"""Looked up once, for each request asks."""


class RoleSelector(NamedTuple):
    """What a request says of where it wants to go: a model or alias, else a route key, else nothing."""

    model: str | None = None
    route_key: str | None = None


class RouterTarget(NamedTuple):
    """The model's router, which chooses among its replicas itself."""

    model: RoleModel
    url: str

    @property
    def server_id(self) -> str:
        """By which its requests in flight are counted."""
        return f"{self.model.name}@{self.url}"

    @property
    def base_url(self) -> str:
        return self.url

    @property
    def candidates(self) -> tuple[RouterTarget]:
        return (self,)


class ReplicaTarget(NamedTuple):
    """Replicas of which any may get the request; at least one, each with a `base_url`."""

    model: RoleModel
    candidates: tuple[RoleReplica, ...]


RoleTarget = RouterTarget | ReplicaTarget


def choose_model(snapshot: RoleSnapshot, selector: RoleSelector) -> RoleModel:
    """The model that is asked for: the named one, else that of the route key, else the default.

    A selector that is given has to resolve: `UnknownModelError` tells its `field`. Without one, and
    without a default, it is an `UnknownModelError` for `model` where there are several models, and
    `RoleNotReadyError` where there is none yet.
    """
    content = snapshot.content
    if selector.model is not None:
        return _named(snapshot, selector.model)
    if selector.route_key is not None:
        mapped = content.routing.route_keys.get(selector.route_key)
        model = None if mapped is None else content.by_name.get(mapped)
        if model is not None:
            return model
        if content.routing.on_unmapped_route_key is UnmappedRouteKey.REFUSE:
            raise UnknownModelError(
                _unmapped(snapshot, selector.route_key, mapped), field="route_key"
            )
    return _default(snapshot)


def resolve(snapshot: RoleSnapshot, selector: RoleSelector, *, direct: bool) -> RoleTarget:
    """Where the request may go. `direct`: for a client, which can use only what is exposed.

    Raises as `choose_model` does, and `RoleNotReadyError` where the model takes no requests now.
    """
    model = choose_model(snapshot, selector)
    if model.state is _READY:
        exposed = not direct or snapshot.content.expose_engine_urls
        if model.route_mode is _BY_ROUTER:
            if exposed and model.router_url is not None:
                return RouterTarget(model, model.router_url)
        elif exposed and (candidates := model.eligible if direct else model.serving):
            return ReplicaTarget(model, candidates)
    raise _not_ready(snapshot, model, direct=direct)


def _named(snapshot: RoleSnapshot, name: str) -> RoleModel:
    content = snapshot.content
    model = content.by_name.get(name)
    if model is None:
        alias = content.routing.aliases.get(name)
        model = None if alias is None else content.by_name.get(alias)
    if model is None:
        raise UnknownModelError(
            f"role {snapshot.role!r} has no model {_shown(name)}; {_known(content)}", field="model"
        )
    return model


def _default(snapshot: RoleSnapshot) -> RoleModel:
    content = snapshot.content
    name = content.routing.default_model
    if name is not None:
        model = content.by_name.get(name)
        if model is not None:
            return model
    elif len(content.models) == 1:
        return content.models[0]
    if not content.models or name is not None:
        raise RoleNotReadyError(
            f"role {snapshot.role!r} has no model yet; send the request again later",
            role=snapshot.role,
            model=name,
            phase=content.phase,
            revision=snapshot.revision,
            epoch=snapshot.epoch,
            retry_after_s=LONG_RETRY_AFTER_S,
        )
    keys = content.routing.route_keys
    hint = f" or give route_key, one of {_listed(keys)}" if keys else ""
    raise UnknownModelError(
        f"the request names no model, and role {snapshot.role!r} has several and no default; name"
        f" one as model ({_known(content)}){hint}",
        field="model",
    )


def _unmapped(snapshot: RoleSnapshot, route_key: str, mapped: str | None) -> str:
    routing = snapshot.content.routing
    if mapped is not None:
        return (
            f"route_key {_shown(route_key)} of role {snapshot.role!r} stands for model {mapped!r},"
            f" which it has not; {_known(snapshot.content)}"
        )
    known = f"known: {_listed(routing.route_keys)}" if routing.route_keys else "it has none"
    return f"role {snapshot.role!r} has no route_key {_shown(route_key)}; {known}"


def _not_ready(snapshot: RoleSnapshot, model: RoleModel, *, direct: bool) -> RoleNotReadyError:
    why, retry_after_s = _why(snapshot, model, direct=direct)
    return RoleNotReadyError(
        f"model {model.name!r} of role {snapshot.role!r} takes no requests now: {why}; send the"
        " request again later",
        role=snapshot.role,
        model=model.name,
        state=model.state,
        phase=snapshot.content.phase,
        revision=snapshot.revision,
        epoch=snapshot.epoch,
        retry_after_s=retry_after_s,
    )


def _why(snapshot: RoleSnapshot, model: RoleModel, *, direct: bool) -> tuple[str, int]:
    """In words, and when it is worth asking again."""
    ready = model.state is _READY
    routed = model.route_mode is _BY_ROUTER
    if direct and ready and (not snapshot.content.expose_engine_urls or _is_hidden(model)):
        return "its engines are not shown to clients; go through the gateway", RETRY_AFTER_S
    if ready and routed:
        return "its router is not there yet", RETRY_AFTER_S
    if any(replica.worker_type is not WorkerType.REGULAR for replica in model.replicas):
        return "prefill and decode need a router, and it has none", LONG_RETRY_AFTER_S
    if not model.replicas and model.state is ReplicaState.SLEEPING:
        role = snapshot.role
        why = (
            f"it has no replicas; `phalanx scale {role}/{model.name} N` adds some, and `phalanx wake"
            f" {role}` starts those of a role that was never started"
        )
        return why, LONG_RETRY_AFTER_S
    states = Counter(replica.state for replica in model.replicas)
    listed = ", ".join(f"{states[state]} {state}" for state in ReplicaState if states[state])
    engines = f"it is {model.state}" + (f" ({listed})" if listed else ", without engines")
    soon = ready or model.state is ReplicaState.DRAINING
    return engines, RETRY_AFTER_S if soon else LONG_RETRY_AFTER_S


def _is_hidden(model: RoleModel) -> bool:
    return bool(model.serving) and model.route_mode is RouteMode.DIRECT


def _known(content: RoleContent) -> str:
    names = (*content.by_name, *content.routing.aliases)
    return f"known: {_listed(names)}" if names else "it has no model yet"


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(repr(name) for name in ordered[:_MAX_LISTED])
    more = len(ordered) - _MAX_LISTED
    return shown if more <= 0 else f"{shown} and {more} more"


def _shown(given: str) -> str:
    """A caller's own text, cut where it is long."""
    return repr(given if len(given) <= 80 else given[:80] + "...")
