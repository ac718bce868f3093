"""A model is scaled within the bundles of its plan, and no further."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.placement.planner import plan
from phalanx.schema.roles import InferenceModelSpec
from tests.roles.manager.case import case, run
from tests.roles.placement.requests import DECOUPLED, DEFER, SPLIT, group, nodes, request, role


def planned(mode, *groups):
    (spec,) = plan(request(mode, nodes(8), role("rollout", *groups))).roles
    (model,) = spec.models
    return InferenceModelSpec("m", "/m", model.engine_groups, elastic_enabled=True)


@pytest.mark.parametrize("mode", [DECOUPLED, SPLIT, DEFER])
def test_a_model_without_free_bundles_is_not_scaled(mode):
    async def scenario() -> None:
        c = case(planned(mode, group(2, 2)))
        await c.manager.activate()
        before = c.revision
        with pytest.raises(ConfigurationError) as refused:
            await c.manager.scale("m", 3)
        for words in ("replicas=3", "has bundles for 2 replicas of ranks=2", "at most 2"):
            assert words in str(refused.value)
        assert c.revision == before
        await c.manager.scale("m", 1)
        await c.manager.scale("m", 2)
        await c.manager.shutdown()

    run(scenario)


def test_bundles_to_scale_into_are_used():
    async def scenario() -> None:
        c = case(planned(SPLIT, group(1, 2, bundles=[0, 1, 2, 3])))
        await c.manager.activate()
        await c.manager.scale("m", 2)
        with pytest.raises(ConfigurationError, match="has bundles for 2 replicas"):
            await c.manager.scale("m", 3)
        await c.manager.shutdown()

    run(scenario)


def test_a_model_that_was_not_planned_is_scaled_at_will():
    async def scenario() -> None:
        c = case(InferenceModelSpec("m", "/m", (group(1),), elastic_enabled=True))
        await c.manager.activate()
        await c.manager.scale("m", 4)
        await c.manager.shutdown()

    run(scenario)
