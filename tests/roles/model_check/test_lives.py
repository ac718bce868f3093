"""Any life of a job: whatever ends, gets lost, is repeated or comes late, and whatever operators ask for
meanwhile, no device has two, every batch is trained on once, and it all comes to its end.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from phalanx.testing.job_world_faults import WorldFault
from tests.roles.model_check.living import MIXED, SMALL, WIDE, Case, live

LAYOUTS = st.sampled_from(
    [
        SMALL,
        WIDE,
        replace(SMALL, says=False),
        replace(WIDE, says=False),
        replace(WIDE, lasting=False),
        MIXED,
        replace(MIXED, lasting=False),
    ]
)
FAULTS = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 2, 3, 5, 8, 13, 20, 30]), st.sampled_from(WorldFault)),
    max_size=6,
)
ROLES = st.sampled_from(["rollout", "teacher"])
IDS = st.sampled_from(["o0", "o1", "o2"])


@st.composite
def meddling(draw) -> tuple[float, str, str, dict]:
    """What somebody asks of the control process, whether it is of use or not."""
    role, operation_id = draw(ROLES), draw(IDS)
    path, body = draw(
        st.sampled_from(
            [
                (f"/v1/roles/{role}/activate", {}),
                (f"/v1/roles/{role}/deactivate", {}),
                (f"/v1/roles/{role}/drain", {}),
                (f"/v1/roles/{role}/recover", {"engine_id": f"{role}/0"}),
                (f"/v1/roles/{role}/unblock", {"engine_id": f"{role}/0"}),
                ("/v1/roles/rollout/models/rollout/scale", {"replicas": 1}),
                ("/v1/phases/recover", {"operation_id": operation_id}),
                ("/v1/phases/leave", {"operation_id": operation_id}),
                ("/v1/phases/leave", {"operation_id": operation_id, "abandon": True}),
                (
                    "/v1/phases/enter",
                    {"phase": role, "batch": "step-0", "operation_id": operation_id},
                ),
                (
                    "/v1/phases/enter",
                    {"phase": "train", "batch": "step-0", "operation_id": operation_id},
                ),
            ]
        )
    )
    return draw(st.sampled_from([0.5, 2.0, 4.0, 10.0, 30.0])), "POST", path, body


CASES = st.builds(
    Case,
    layout=LAYOUTS,
    faults=FAULTS,
    meddling=st.lists(meddling(), max_size=3),
    num_steps=st.sampled_from([1, 1, 2]),
    elsewhere=st.booleans(),
)


@settings(max_examples=20)
@given(CASES)
def test_d9_i103_any_life_of_a_job_comes_to_its_end_with_one_on_each_device(case):
    assert live(case).problems == []


@pytest.mark.long
@settings(max_examples=200)
@given(CASES)
def test_d9_i103_many_lives_of_a_job(case):
    assert live(case).problems == []
