"""How a role says no, and how that is read."""

from __future__ import annotations

import json

import pytest

from phalanx.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    NoServerError,
    RoleNotReadyError,
    UnknownModelError,
)
from phalanx.wire.discovery import refusal_body, refusal_of, refusal_status


def test_i39_a_model_that_is_not_ready_is_503_with_state_phase_and_revision():
    error = RoleNotReadyError(
        "it sleeps",
        role="genrm",
        model="judge",
        state="sleeping",
        phase="train",
        revision=12,
        epoch="e1",
        retry_after_s=5,
    )
    assert refusal_status(error) == 503
    told = json.loads(refusal_body(error))
    assert told.pop("error") == {
        "message": "it sleeps",
        "type": "service_unavailable_error",
        "param": None,
        "code": "not_ready",
    }
    assert told == {
        "role": "genrm",
        "model": "judge",
        "state": "sleeping",
        "phase": "train",
        "topology_revision": 12,
        "registry_epoch": "e1",
        "retry_after_s": 5,
    }
    back = refusal_of(refusal_body(error))
    assert isinstance(back, RoleNotReadyError) and vars(back) == vars(error)


@pytest.mark.parametrize("field", ["model", "route_key"])
def test_i34_i35_an_unknown_model_or_key_is_400_and_names_the_field(field):
    error = UnknownModelError("no such judge", field=field)
    told = json.loads(refusal_body(error))["error"]
    assert refusal_status(error) == 400
    assert (told["code"], told["param"], told["type"]) == (
        "unknown_model",
        field,
        "invalid_request_error",
    )
    back = refusal_of(refusal_body(error))
    assert isinstance(back, UnknownModelError) and back.field == field


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("both forms", field="messages"), 400, "invalid_request"),
        (NoServerError("all tried"), 503, "no_server"),
        (EngineUnavailableError("lost"), 503, "unavailable"),
    ],
)
def test_other_errors_have_the_same_shape(error, status, code):
    assert refusal_status(error) == status
    assert json.loads(refusal_body(error))["error"]["code"] == code


@pytest.mark.parametrize(
    "body",
    [b"", b"no", b"[]", b'{"error": "text"}', b'{"error": {"code": "not_ready"}}', b"\xff"],
)
def test_what_is_no_refusal_of_a_role_is_none(body):
    assert refusal_of(body) is None
