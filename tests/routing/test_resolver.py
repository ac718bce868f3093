"""The one resolver: who may get a request, and what a request that nobody gets is told."""

from __future__ import annotations

import pytest

from phalanx.errors import NoServerError, UnknownModelError
from phalanx.routing.endpoint import Endpoint, Scheme
from phalanx.routing.resolver import Selector, resolve
from phalanx.routing.snapshot import Server, ServerState, Snapshot


def server(name: str, model: str, state: ServerState, *, http: bool = False, detail: str = ""):
    endpoint = Endpoint.parse("http://127.0.0.1:2" if http else "127.0.0.1:1")
    return Server(name, model, endpoint, state, detail=detail)


READY, DOWN, DRAINING = ServerState.READY, ServerState.UNHEALTHY, ServerState.DRAINING
SNAPSHOT = Snapshot(
    "e",
    7,
    (
        server("a", "pi05", READY),
        server("b", "pi05", DOWN),
        server("c", "pi05", READY),
        server("d", "act", DOWN, detail="connection refused"),
        server("e", "llm", READY, http=True),
        server("f", "old", DRAINING),
    ),
)


def test_only_ready_servers_of_the_model_and_the_scheme_are_candidates():
    found = resolve(SNAPSHOT, Selector(Scheme.GRPC, "pi05"))
    assert [known.server_id for known in found] == ["a", "c"]


def test_no_name_means_the_only_model_of_the_scheme():
    assert resolve(SNAPSHOT, Selector(Scheme.HTTP))[0].model_name == "llm"
    with pytest.raises(UnknownModelError, match="names no model.*'act', 'pi05'"):
        resolve(SNAPSHOT, Selector(Scheme.GRPC))


def test_an_unknown_model_is_told_the_known_ones():
    with pytest.raises(UnknownModelError, match="'pi5' is not served here; known: 'act', 'pi05'"):
        resolve(SNAPSHOT, Selector(Scheme.GRPC, "pi5"))


def test_a_model_of_the_other_scheme_is_told_so():
    with pytest.raises(UnknownModelError, match="'llm' is served over HTTP here, not gRPC"):
        resolve(SNAPSHOT, Selector(Scheme.GRPC, "llm"))


def test_a_model_without_a_ready_server_is_a_matter_of_time():
    with pytest.raises(NoServerError, match=r"1 unhealthy \(connection refused\)") as refused:
        resolve(SNAPSHOT, Selector(Scheme.GRPC, "act"))
    assert refused.value.retry_after_s == 1
    with pytest.raises(NoServerError, match="1 draining"):
        resolve(SNAPSHOT, Selector(Scheme.GRPC, "old"))


def test_callers_are_not_told_addresses():
    with pytest.raises(NoServerError) as refused:
        resolve(SNAPSHOT, Selector(Scheme.GRPC, "act"))
    assert "127.0.0.1" not in str(refused.value)


def test_an_empty_pool_says_how_to_fill_it():
    with pytest.raises(NoServerError, match="--backend MODEL ENDPOINT"):
        resolve(Snapshot("e"), Selector(Scheme.GRPC))
    with pytest.raises(UnknownModelError, match="no gRPC server is registered"):
        resolve(Snapshot("e"), Selector(Scheme.GRPC, "pi05"))
