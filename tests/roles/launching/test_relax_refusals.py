"""Arguments of Relax that cannot be are refused, each with what is wrong."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.relax_args import from_relax_args
from tests.roles.launching.test_relax_args import DEFERRED, SEVERAL_TEACHERS

SMALL = {"hf_checkpoint": "/s", "rollout_num_gpus": 4}
TEACHER = {"use_opd": True, "opd_teacher_routes": {"a": "/a", "b": "/b"}}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({**SMALL, "--learning-rate": 1}, "--learning-rate is not known here; leave out"),
        ({**SMALL, "genrm_num_gpu": 1}, "genrm_num_gpu is not known.* --genrm-num-gpus"),
        ({**SMALL, "sglang_router_retry": 1}, "sglang_router_retry is not known"),
        ({**SMALL, "--rollout-num-gpus": 4}, "--rollout-num-gpus is given twice"),
        ({"rollout_num_gpus": 4}, "--hf-checkpoint is missing"),
        ({"hf_checkpoint": "/s"}, "--rollout-num-gpus is missing"),
        ({**SMALL, "rollout_num_gpus": "four"}, "'four' must be a whole number"),
        ({**SMALL, "rollout_num_gpus": -1}, "-1 must be a whole number from 0"),
        ({**SMALL, "rollout_num_gpus_per_engine": 3}, "4 GPUs cannot be divided .* of 3"),
        ({**SMALL, "rollout_num_gpus": 12, "rollout_num_gpus_per_engine": 12}, "whole ones"),
        ({**SMALL, "colocate": "maybe"}, "'maybe' must be a switch"),
        ({**SMALL, "hf_checkpoint": 3}, "3 must be a text"),
        ({**SMALL, "resource": "{"}, "is no JSON"),
        ({**SMALL, "resource": "[]"}, "must be a JSON object"),
        ({**SMALL, "resource": {"rollout": 4}}, "rollout=4 must be a pair"),
        ({**SMALL, "rollout_external": True}, "without --rollout-external-engine-addrs"),
        ({**SMALL, "sglang_router_ip": "a"}, "without --sglang-router-port"),
        ({**SMALL, "prefill_num_servers": 4}, "leaves no engine for decoding"),
        (
            {**SMALL, "prefill_num_servers": 1, "sglang_config": {"engine_groups": []}},
            "both given",
        ),
        ({**SMALL, "sglang_config": {"engine_groups": 3}}, "list of mappings"),
        (
            {**SMALL, "sglang_config": {"engine_groups": [{"num_gpus": 2}]}},
            "have 2 GPUs, and rollout has 4",
        ),
        (
            {**SMALL, "sglang_config": {"engine_groups": [{"worker_type": "x", "num_gpus": 4}]}},
            "worker_type='x'; allowed",
        ),
        ({**SMALL, "genrm_model_path": "/j", "genrm_instances": {"a": {}}}, "both given"),
        ({**SMALL, "genrm_instances": {"a": {}}}, "'a' must be a mapping with a model_path"),
        ({**SMALL, "use_opd": True}, "given: none"),
        ({**SMALL, **TEACHER, "teacher_hf_checkpoint": "/t"}, "given: --opd-teacher-routes, --t"),
        ({**SMALL, **TEACHER}, "gives 'teacher' no GPUs"),
        ({**SMALL, **TEACHER, "resource": {"teacher": [1, 3]}}, "cannot be shared equally by 2"),
        ({**SMALL, "rollout_health_check_interval": "soon"}, "must be a number of seconds"),
    ],
)
def test_what_cannot_be_is_refused(arguments, why):
    with pytest.raises(ConfigurationError, match=why):
        from_relax_args(arguments)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"defer_reward_to_post_process": False},
            "rollout and genrm have the same GPUs at the same",
        ),
        ({"opd_teacher_defer": False}, "rollout and teacher have the same GPUs at the same"),
    ],
)
def test_roles_on_the_same_devices_at_the_same_time_are_refused(changed, why):
    with pytest.raises(ConfigurationError, match=why):
        from_relax_args({**DEFERRED, **changed})


def test_what_does_not_fit_the_trainers_devices_is_refused():
    resource = {"actor": [1, 8], "rollout": [1, 6], "teacher": [1, 4]}
    arguments = {**SEVERAL_TEACHERS, "--resource": resource}
    with pytest.raises(ConfigurationError, match="teacher ends at GPU 10 of the 8"):
        from_relax_args(arguments)
