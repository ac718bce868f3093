"""The values of an RL job's roles: what each has, what follows from what, and that nothing changes."""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, fields

import pytest

from phalanx.errors import ConfigurationError
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    InferenceModelSpec,
    InferenceRoleSpec,
    ModelPlacement,
    Ownership,
    RouteMode,
    RoutingSpec,
    WeightSource,
    WorkloadType,
)

MODEL = InferenceModelSpec("m", "/m", (EngineGroupSpec(),))
PLACEMENT = ModelPlacement(Ownership.MANAGER, (0,), (0,), None, None)
ROLE = InferenceRoleSpec("rollout", WorkloadType.ROLLOUT, DeploymentSpec(), RoutingSpec(), (MODEL,))


def members(kind: type) -> dict[str, object]:
    """Its fields and their defaults; `MISSING` has none."""
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(kind)
    }


def frozen(value: object) -> None:
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, None)


def test_i11_a_role_has_these_members_and_is_frozen():
    assert members(InferenceRoleSpec) == {
        "role": MISSING,
        "workload": MISSING,
        "deployment": MISSING,
        "routing": MISSING,
        "models": MISSING,
        "expose_engine_urls": True,
    }
    frozen(ROLE)
    frozen(ROLE.deployment)
    frozen(ROLE.routing)
    with pytest.raises(TypeError):
        ROLE.routing.route_keys["math"] = "m"


def test_i12_a_model_has_these_members_and_is_frozen():
    named = members(InferenceModelSpec)
    # Beside them, what its servers call it, and a router that somebody else runs.
    assert (named.pop("served_model_name"), named.pop("router_url")) == (None, None)
    assert named == {
        "name": MISSING,
        "model_path": MISSING,
        "engine_groups": MISSING,
        "weight_source": WeightSource.STATIC,
        "route_mode": RouteMode.DIRECT,
        "sampling_defaults": {},
        "chat_template_kwargs": {},
        "env_vars": {},
        "elastic_enabled": False,
        "fault_tolerance_enabled": False,
    }
    frozen(MODEL)
    frozen(MODEL.engine_groups[0])
    given = {"A": "1"}
    model = InferenceModelSpec("m", "/m", (EngineGroupSpec(),), env_vars=given)
    given["B"] = "2"
    assert model.env_vars == {"A": "1"}, "it changes with what it was made of"
    for mapping in (model.env_vars, model.sampling_defaults, model.chat_template_kwargs):
        with pytest.raises(TypeError):
            mapping["B"] = "2"


def test_i13_a_placement_has_these_members_and_is_frozen():
    assert members(ModelPlacement) == dict.fromkeys(
        ("pg_owner", "bundle_indices", "gpu_ids", "activation_group", "activation_phase"), MISSING
    )
    frozen(PLACEMENT)


@pytest.mark.parametrize("source", WeightSource)
def test_i14_i15_what_a_model_needs_for_its_weights_follows_from_their_source(source):
    model = InferenceModelSpec("m", "/m", (EngineGroupSpec(),), weight_source=source)
    assert model.needs_weight_update is (source is not WeightSource.STATIC)
    assert model.needs_dcs is (source is WeightSource.DCS)


@pytest.mark.parametrize("mode", RouteMode)
def test_i16_a_router_is_needed_by_the_route_mode_alone(mode):
    model = InferenceModelSpec("m", "/m", (EngineGroupSpec(),), route_mode=mode)
    assert model.needs_router is (mode is RouteMode.SGLANG_ROUTER)
    own = {"route_mode": mode, "router_url": "http://127.0.0.1:1"}
    if model.needs_router:
        assert InferenceModelSpec("m", "/m", (EngineGroupSpec(),), **own).needs_router
    else:
        with pytest.raises(ConfigurationError, match=r"router_url='http://127.0.0.1:1'.*direct"):
            InferenceModelSpec("m", "/m", (EngineGroupSpec(),), **own)


@pytest.mark.parametrize("name", ["needs_weight_update", "needs_dcs", "needs_router"])
def test_i17_what_is_derived_cannot_be_set(name):
    with pytest.raises(TypeError, match=name):
        InferenceModelSpec("m", "/m", (EngineGroupSpec(),), **{name: True})
    with pytest.raises((FrozenInstanceError, AttributeError)):
        setattr(MODEL, name, True)
    assert getattr(MODEL, name) is False
