"""Snapshots as documents and back, and what a document never tells."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given, settings

from phalanx.errors import MalformedRequestError
from phalanx.routing.roles.documents import discovery, internal, snapshot_of
from phalanx.routing.roles.encoded import EncodedDocuments
from phalanx.routing.roles.resolver import RoleSelector, resolve
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import RouteMode, RoutingSpec
from phalanx.wire.discovery import decode_discovery, decode_internal, encode_document
from tests.routing.roles.snapshots import model, replica, snapshot, snapshots

# What the source document shows as an example, field by field.
EXAMPLE = {
    "role": "teacher",
    "topology_revision": 7,
    "phase": "deferred_score",
    "models": {
        "math-teacher": {
            "state": "ready",
            "router_url": None,
            "engines": [
                {
                    "engine_id": "math-teacher/0",
                    "base_url": "http://node-1:15000",
                    "state": "ready",
                    "direct_eligible": True,
                }
            ],
        }
    },
}


def shown(of) -> dict:
    return json.loads(encode_document(discovery(of)))


@settings(max_examples=40, deadline=None)
@given(snapshots())
def test_a_snapshot_survives_its_internal_document(of):
    assert snapshot_of(decode_internal(encode_document(internal(of)))) == of


@settings(max_examples=40, deadline=None)
@given(snapshots(always_exposed=True))
def test_what_clients_are_told_is_all_but_what_the_gateway_keeps(of):
    told = discovery(of)
    again = discovery(snapshot_of(decode_discovery(encode_document(told))))
    assert again == told


@settings(max_examples=40, deadline=None)
@given(snapshots())
def test_i18_d1_no_address_is_told_of_what_is_not_exposed(of):
    told = discovery(of)
    for entry in told.models.values():
        if not of.content.expose_engine_urls:
            assert entry.router_url is None
            assert all(engine.base_url is None for engine in entry.engines)
            assert not any(engine.direct_eligible for engine in entry.engines)
        assert all(engine.base_url for engine in entry.engines if engine.direct_eligible)


def test_i18_d1_neither_an_address_nor_a_detail_shows_it():
    hidden = replica("math/0", ReplicaState.DEAD, detail="no connection to 10.0.0.1:15000")
    of = snapshot(
        model(
            "math", hidden, route_mode=RouteMode.SGLANG_ROUTER, router_url="http://10.0.0.1:8000"
        ),
        expose=False,
    )
    assert b"10.0.0.1" not in encode_document(discovery(of))
    assert b"10.0.0.1:15000" in encode_document(internal(of))


def test_i44_i45_i46_i47_the_example_is_read_and_its_fields_are_written():
    read = snapshot_of(decode_discovery(json.dumps(EXAMPLE).encode()))
    assert (read.role, read.revision, read.content.phase) == ("teacher", 7, "deferred_score")
    target = resolve(read, RoleSelector(), direct=True)
    assert [one.base_url for one in target.candidates] == ["http://node-1:15000"]
    written = shown(read)
    for name in ("role", "topology_revision", "phase"):
        assert written[name] == EXAMPLE[name]
    for name, value in EXAMPLE["models"]["math-teacher"].items():
        if name != "engines":
            assert written["models"]["math-teacher"][name] == value
    (engine,) = written["models"]["math-teacher"]["engines"]
    assert engine.items() >= EXAMPLE["models"]["math-teacher"]["engines"][0].items()


def test_d5_d6_d10_d11_epoch_generation_routing_and_lower_case_states_are_told():
    asleep = replica("math/0", ReplicaState.SLEEPING, generation=3, detail="put to sleep")
    written = shown(
        snapshot(
            model("math", asleep, state=ReplicaState.SLEEPING),
            routing=RoutingSpec(route_keys={"gsm8k": "math"}, aliases={"judge": "math"}),
        )
    )
    assert written["registry_epoch"] == "e1"
    assert written["routing"] == {
        "default_model": None,
        "route_keys": {"gsm8k": "math"},
        "aliases": {"judge": "math"},
        "policy": "least_in_flight",
        "on_unmapped_route_key": "refuse",
    }
    (engine,) = written["models"]["math"]["engines"]
    assert (engine["state"], engine["generation"]) == ("sleeping", 3)
    assert engine["detail"] == "put to sleep"


@pytest.mark.parametrize("state", [state for state in ReplicaState if state != "ready"])
def test_i53_only_a_ready_engine_is_eligible(state):
    (engine,) = shown(snapshot(model("math", replica("math/0", state))))["models"]["math"][
        "engines"
    ]
    assert engine["direct_eligible"] is False and engine["state"] == str(state)


def test_fields_that_a_reader_does_not_know_are_left_aside():
    newer = {**EXAMPLE, "weather": {"sun": 1}}
    newer["models"] = {"m": {"state": "ready", "mood": 1, "engines": [{**_engine(), "x": []}]}}
    read = snapshot_of(decode_discovery(json.dumps(newer).encode()))
    assert len(read.content.models[0].eligible) == 1


def test_an_engine_that_is_told_to_be_not_eligible_is_not_used_though_it_is_ready():
    told = {"role": "r", "models": {"m": {"state": "ready", "engines": [_engine(False)]}}}
    read = snapshot_of(decode_discovery(json.dumps(told).encode()))
    assert read.content.models[0].eligible == ()


def test_a_model_with_a_router_url_and_no_route_mode_is_reached_by_it():
    told = {"role": "r", "models": {"m": {"state": "ready", "router_url": "http://r:1"}}}
    read = snapshot_of(decode_discovery(json.dumps(told).encode()))
    assert resolve(read, RoleSelector(), direct=True).base_url == "http://r:1"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no",
        b"[]",
        b"{}",
        b'{"role": 1}',
        b'{"role": "r", "models": {"m": {}}}',
        b'{"role": "r", "topology_revision": "7"}',
        b'{"role": "r", "models": {"m": {"state": "ready", "route_mode": "random"}}}',
        b"\xff",
    ],
)
def test_what_is_no_document_is_refused(body):
    with pytest.raises(MalformedRequestError, match="no discovery document"):
        decode_discovery(body)


def test_an_unknown_state_is_refused_with_the_known_ones():
    told = {"role": "r", "models": {"m": {"state": "READY"}}}
    with pytest.raises(MalformedRequestError, match="'READY'; known: starting, ready"):
        snapshot_of(decode_discovery(json.dumps(told).encode()))


def test_documents_are_encoded_once_a_snapshot_for_everybody():
    documents = EncodedDocuments()
    many = tuple(replica(f"math/{number}") for number in range(50))
    of = snapshot(model("math", *many))
    first = documents.of(of)
    assert documents.of(of) is first
    assert first.discovery is first.discovery and first.internal is first.internal
    assert first.discovery == encode_document(discovery(of))
    assert first.internal == encode_document(internal(of))
    compressed = first.compressed
    assert compressed is first.compressed and compressed is not None
    assert gzip.decompress(compressed) == first.discovery
    assert len(compressed) < len(first.discovery) / 5
    assert documents.of(snapshot(model("math"), revision=8)) is not first
    assert documents.of(snapshot(revision=9)).compressed is None


def test_a_document_that_is_not_followed_any_more_says_why_and_goes_back_to_what_it_was():
    documents, of = EncodedDocuments(), snapshot(model("math", replica("math/0")))
    fresh = documents.of(of)
    stale = documents.of(of, "nobody answers")
    assert documents.of(of, "nobody answers") is stale and stale is not fresh
    told = decode_discovery(stale.discovery)
    assert told.stale == "nobody answers" and snapshot_of(told) == of
    assert b"stale" not in documents.of(of).discovery and b"stale" not in stale.internal


def _engine(eligible: bool = True) -> dict:
    return {
        "engine_id": "m/0",
        "base_url": "http://h:1",
        "state": "ready",
        "direct_eligible": eligible,
    }
