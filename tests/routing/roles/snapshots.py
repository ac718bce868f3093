"""Snapshots of roles: written out for examples, and any at all for properties."""

from __future__ import annotations

from hypothesis import strategies as st

from phalanx.routing.roles.resolver import RoleSelector
from phalanx.routing.roles.snapshot import (
    ReplicaState,
    RoleContent,
    RoleModel,
    RoleReplica,
    RoleSnapshot,
)
from phalanx.schema.roles import (
    RouteMode,
    RoutingPolicy,
    RoutingSpec,
    UnmappedRouteKey,
    WeightSource,
    WorkerType,
    WorkloadType,
)

READY = ReplicaState.READY
NAMES = ("math", "code", "big")
ALIASES = ("judge", "teacher")
KEYS = ("gsm8k", "mbpp", "")


def replica(name: str = "math/0", state: ReplicaState = READY, **changes: object) -> RoleReplica:
    url = changes.pop("base_url", f"http://10.0.0.1:{15000 + int(name.rpartition('/')[2])}")
    return RoleReplica(name, url, state, **changes)  # type: ignore[arg-type]


def model(
    name: str = "math", *replicas: RoleReplica, state: ReplicaState = READY, **changes: object
) -> RoleModel:
    return RoleModel(name, state, replicas=replicas, **changes)  # type: ignore[arg-type]


def snapshot(
    *models: RoleModel,
    routing: RoutingSpec | None = None,
    phase: str | None = None,
    expose: bool = True,
    revision: int = 7,
) -> RoleSnapshot:
    content = RoleContent(
        WorkloadType.TEACHER, routing or RoutingSpec(), models, phase, expose_engine_urls=expose
    )
    return RoleSnapshot("teacher", "e1", revision, content)


texts = st.text(max_size=8)
states = st.sampled_from(ReplicaState)


@st.composite
def replicas(draw: st.DrawFn, name: str, ordinal: int, exposed: st.SearchStrategy[bool]):
    port = 15000 + ordinal
    return RoleReplica(
        f"{name}/{ordinal}",
        draw(st.none() | st.just(f"http://10.0.0.1:{port}")),
        draw(states | st.just(READY)),
        generation=draw(st.integers(0, 3)),
        worker_type=draw(st.just(WorkerType.REGULAR) | st.sampled_from(WorkerType)),
        exposed=draw(exposed),
        weight_version=draw(st.none() | texts),
        detail=draw(st.just("") | texts),
        blocked=draw(st.booleans()),
    )


@st.composite
def models(draw: st.DrawFn, name: str, exposed: st.SearchStrategy[bool]):
    count = draw(st.integers(0, 4))
    json = st.none() | st.booleans() | st.integers(-5, 5) | texts
    return RoleModel(
        name,
        draw(states | st.just(READY)),
        route_mode=draw(st.sampled_from(RouteMode)),
        router_url=draw(st.none() | st.just("http://10.0.0.2:8000")),
        replicas=tuple(draw(replicas(name, ordinal, exposed)) for ordinal in range(count)),
        served_model_name=draw(st.just("") | texts),
        weight_source=draw(st.sampled_from(WeightSource)),
        weight_version=draw(st.none() | texts),
        sampling_defaults=draw(st.dictionaries(texts, json, max_size=2)),
        chat_template_kwargs=draw(st.dictionaries(texts, json, max_size=2)),
    )


@st.composite
def contents(draw: st.DrawFn, *, always_exposed: bool = False):
    exposed = st.just(True) if always_exposed else st.booleans()
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=3))
    targets = st.sampled_from(names) if names else st.nothing()
    some = st.dictionaries(st.sampled_from(KEYS), targets, max_size=2) if names else st.just({})
    others = st.dictionaries(st.sampled_from(ALIASES), targets) if names else st.just({})
    routing = RoutingSpec(
        default_model=draw(st.none() | targets),
        route_keys=draw(some),
        aliases=draw(others),
        policy=draw(st.sampled_from(RoutingPolicy)),
        on_unmapped_route_key=draw(st.sampled_from(UnmappedRouteKey)),
    )
    return RoleContent(
        draw(st.sampled_from(WorkloadType)),
        routing,
        tuple(draw(models(name, exposed)) for name in names),
        phase=draw(st.none() | texts),
        expose_engine_urls=draw(exposed),
    )


def snapshots(*, always_exposed: bool = False) -> st.SearchStrategy[RoleSnapshot]:
    return st.builds(
        RoleSnapshot,
        st.sampled_from(("rollout", "genrm", "teacher")),
        texts,
        st.integers(0, 2**40),
        contents(always_exposed=always_exposed),
    )


selectors = st.builds(
    RoleSelector,
    st.none() | st.sampled_from((*NAMES, *ALIASES, "typo", "")),
    st.none() | st.sampled_from((*KEYS, "typo")),
)
