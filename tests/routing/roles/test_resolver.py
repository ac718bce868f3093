"""Which model and which replicas get a request, and what is said where none does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from phalanx.errors import NoServerError, PhalanxError, RoleNotReadyError, UnknownModelError
from phalanx.routing.roles.documents import discovery, snapshot_of
from phalanx.routing.roles.resolver import (
    ReplicaTarget,
    RoleSelector,
    RouterTarget,
    choose_model,
    resolve,
)
from phalanx.routing.roles.snapshot import ReplicaState, RoleReplica, RoleSnapshot
from phalanx.schema.roles import RouteMode, RoutingSpec, UnmappedRouteKey, WorkerType
from phalanx.wire.discovery import decode_discovery, encode_document, refusal_body, refusal_of
from tests.routing.roles.snapshots import model, replica, selectors, snapshot, snapshots

TWO = (model("math", replica("math/0")), model("code", replica("code/0")))
KEYED = RoutingSpec(default_model="code", route_keys={"gsm8k": "math"}, aliases={"judge": "math"})


def chosen(routing: RoutingSpec, name: str | None = None, key: str | None = None) -> str:
    return choose_model(snapshot(*TWO, routing=routing), RoleSelector(name, key)).name


def refused(of: RoleSnapshot, *selector: str | None, direct: bool = False) -> PhalanxError:
    with pytest.raises((UnknownModelError, RoleNotReadyError)) as raised:
        resolve(of, RoleSelector(*selector), direct=direct)
    return raised.value


def test_i31_an_explicit_model_wins_over_key_and_default():
    assert chosen(KEYED, "math") == "math"
    assert chosen(KEYED, "code", "gsm8k") == "code"
    assert chosen(KEYED, "code", "not mapped") == "code"


def test_an_alias_is_a_name_of_its_model_and_no_name_of_another():
    assert chosen(KEYED, "judge") == "math"


def test_i32_else_the_route_key_finds_it():
    assert chosen(KEYED, None, "gsm8k") == "math"


def test_i33_else_the_default_model_and_a_single_model_is_one():
    assert chosen(KEYED) == "code"
    single = snapshot(TWO[0], routing=RoutingSpec())
    assert choose_model(single, RoleSelector()).name == "math"


def test_i34_else_it_is_refused_and_says_what_could_be_named():
    error = refused(snapshot(*TWO, routing=RoutingSpec(route_keys={"gsm8k": "math"})))
    assert isinstance(error, UnknownModelError) and error.field == "model"
    assert "known: 'code', 'math'" in str(error) and "one of 'gsm8k'" in str(error)


def test_i35_an_explicit_unknown_model_never_falls_through():
    for key in (None, "gsm8k"):
        error = refused(snapshot(*TWO, routing=KEYED), "typo", key)
        assert isinstance(error, UnknownModelError) and error.field == "model"
        assert "has no model 'typo'; known: 'code', 'judge', 'math'" in str(error)
    assert refused(snapshot(*TWO, routing=KEYED), "").field == "model"


def test_i36_d3_an_unmapped_key_is_refused_though_there_is_a_default():
    error = refused(snapshot(*TWO, routing=KEYED), None, "gsm9k")
    assert isinstance(error, UnknownModelError) and error.field == "route_key"
    assert "no route_key 'gsm9k'; known: 'gsm8k'" in str(error)


def test_i36_d3_an_unmapped_key_takes_the_default_where_that_is_asked_for():
    routing = RoutingSpec(
        default_model="code",
        route_keys={"gsm8k": "math"},
        on_unmapped_route_key=UnmappedRouteKey.DEFAULT,
    )
    assert chosen(routing, None, "gsm9k") == "code"
    assert chosen(routing, None, "gsm8k") == "math"
    no_default = RoutingSpec(on_unmapped_route_key=UnmappedRouteKey.DEFAULT)
    assert refused(snapshot(*TWO, routing=no_default), None, "k").field == "model"


def test_i37_a_model_with_a_router_is_reached_by_it_alone():
    routed = model(
        "math",
        replica("math/0"),
        route_mode=RouteMode.SGLANG_ROUTER,
        router_url="http://10.0.0.9:8000",
    )
    for direct in (False, True):
        target = resolve(snapshot(routed), RoleSelector(), direct=direct)
        assert isinstance(target, RouterTarget) and target.base_url == "http://10.0.0.9:8000"
    without = model("math", replica("math/0"), route_mode=RouteMode.SGLANG_ROUTER)
    assert "its router is not there yet" in str(refused(snapshot(without)))


def test_i38_a_direct_model_is_reached_at_the_replicas_that_are_ready():
    ready, other = replica("math/1"), replica("math/3")
    asleep = replica("math/0", ReplicaState.SLEEPING)
    no_url = replica("math/2", base_url=None)
    doubted = replica("math/4", blocked=True)
    of = snapshot(model("math", asleep, ready, no_url, other, doubted))
    for direct in (False, True):
        target = resolve(of, RoleSelector("math"), direct=direct)
        assert isinstance(target, ReplicaTarget) and target.candidates == (ready, other)


@pytest.mark.parametrize("state", [state for state in ReplicaState if state != "ready"])
@pytest.mark.parametrize("direct", [False, True])
def test_i39_a_model_that_is_not_ready_is_refused_with_what_it_does_instead(state, direct):
    of = snapshot(model("math", replica("math/0", state), state=state), phase="train")
    error = refused(of, "math", direct=direct)
    assert isinstance(error, RoleNotReadyError) and isinstance(error, NoServerError)
    assert (error.role, error.model, error.state) == ("teacher", "math", state)
    assert (error.phase, error.revision, error.epoch) == ("train", 7, "e1")
    assert error.retry_after_s >= 1 and f"it is {state} (1 {state})" in str(error)


def test_i39_a_ready_model_without_a_ready_replica_is_refused():
    of = snapshot(model("math", replica("math/0", ReplicaState.DRAINING)))
    assert refused(of).state == "ready"
    of = snapshot(model("math", replica("math/0"), state=ReplicaState.DRAINING))
    assert refused(of).state == "draining"


@pytest.mark.parametrize("direct", [False, True])
def test_i39_a_model_without_replicas_says_which_command_brings_some(direct):
    error = refused(snapshot(model("math", state=ReplicaState.SLEEPING)), direct=direct)
    assert "it has no replicas; `phalanx scale teacher/math N` adds some" in str(error)
    starting = refused(snapshot(model("math", state=ReplicaState.STARTING)), direct=direct)
    assert "it is starting, without engines" in str(starting)


def test_a_role_without_models_is_not_ready_and_an_explicit_model_is_unknown_there():
    error = refused(snapshot())
    assert isinstance(error, RoleNotReadyError) and error.model is None and error.state is None
    assert isinstance(refused(snapshot(), "math"), UnknownModelError)


def test_i40_resolving_changes_nothing():
    of = snapshot(model("math", replica("math/0", ReplicaState.SLEEPING)))
    before = encode_document(discovery(of))
    refused(of)
    assert encode_document(discovery(of)) == before


def test_i42_i50_prefill_and_decode_are_reached_by_their_router_alone():
    workers = (
        replica("math/0", worker_type=WorkerType.PREFILL),
        replica("math/1", worker_type=WorkerType.DECODE),
    )
    router = "http://10.0.0.9:8000"
    routed = model("math", *workers, route_mode=RouteMode.SGLANG_ROUTER, router_url=router)
    for direct in (False, True):
        assert resolve(snapshot(routed), RoleSelector(), direct=direct).base_url == router
        error = refused(snapshot(model("math", *workers)), direct=direct)
        assert "prefill and decode need a router" in str(error)
    shown = discovery(snapshot(routed)).models["math"].engines
    assert [engine.direct_eligible for engine in shown] == [False, False]


def test_i18_d1_what_is_not_exposed_is_the_gateways_alone():
    hidden = snapshot(model("math", replica("math/0")), expose=False)
    target = resolve(hidden, RoleSelector(), direct=False)
    assert isinstance(target, ReplicaTarget) and len(target.candidates) == 1
    assert "not shown to clients; go through the gateway" in str(refused(hidden, direct=True))
    router = model("math", route_mode=RouteMode.SGLANG_ROUTER, router_url="http://10.0.0.9:8000")
    assert resolve(snapshot(router, expose=False), RoleSelector(), direct=False).base_url
    assert "not shown" in str(refused(snapshot(router, expose=False), direct=True))


def outcome(of: RoleSnapshot, selector: RoleSelector, *, direct: bool) -> object:
    """Where it may go, or the refusal as it would be read."""
    try:
        target = resolve(of, selector, direct=direct)
    except (UnknownModelError, RoleNotReadyError) as error:
        return type(error), refusal_body(error)
    if isinstance(target, RouterTarget):
        return target.url
    return tuple((one.engine_id, one.generation, one.base_url) for one in target.candidates)


@settings(max_examples=40, deadline=None)
@given(snapshots(always_exposed=True), selectors)
def test_i6_i41_gateway_and_direct_client_choose_from_the_same_with_the_same_errors(of, selector):
    told = snapshot_of(decode_discovery(encode_document(discovery(of))))
    at_gateway = outcome(of, selector, direct=False)
    assert outcome(of, selector, direct=True) == at_gateway
    assert outcome(told, selector, direct=True) == at_gateway


@settings(max_examples=40, deadline=None)
@given(snapshots(), selectors)
def test_i41_a_client_never_gets_what_the_gateway_would_not_use(of, selector):
    told = snapshot_of(decode_discovery(encode_document(discovery(of))))
    direct = outcome(of, selector, direct=True)
    # What a client is told decides as the whole would.
    if isinstance(direct, str) or not isinstance(direct[0], type):
        assert outcome(told, selector, direct=True) == direct
        at_gateway = outcome(of, selector, direct=False)
        assert direct == at_gateway or set(direct) <= set(at_gateway)
    else:
        assert outcome(told, selector, direct=True)[0] is direct[0]
    target = None
    try:
        target = resolve(of, selector, direct=True)
    except (UnknownModelError, RoleNotReadyError):
        return
    assert of.content.expose_engine_urls
    if isinstance(target, ReplicaTarget):
        assert all(_may_serve(one) and one.exposed for one in target.candidates)


@settings(max_examples=40, deadline=None)
@given(snapshots(), selectors)
def test_a_refusal_reads_back_as_the_same_error(of, selector):
    try:
        resolve(of, selector, direct=False)
    except (UnknownModelError, RoleNotReadyError) as error:
        back = refusal_of(refusal_body(error))
        assert type(back) is type(error) and str(back) == str(error)
        assert vars(back) == vars(error)


def _may_serve(one: RoleReplica) -> bool:
    return (
        one.state is ReplicaState.READY
        and one.base_url is not None
        and one.worker_type is WorkerType.REGULAR
        and not one.blocked
    )
