"""Arguments of Relax become role specifications, and nothing of one role reaches another."""

from __future__ import annotations

import json

import pytest

from phalanx.roles.engine_command import EnginePrograms, ListenAddress, engine_command
from phalanx.roles.relax_args import from_relax_args
from phalanx.schema.roles import (
    EngineKind,
    InferenceModelSpec,
    InferenceRoleSpec,
    Ownership,
    PlacementMode,
    RouteMode,
    RoutingPolicy,
    WeightSource,
    WorkerType,
    WorkloadType,
)
from tests.roles.launching.specs import launch_of

COLOCATED = {
    "--hf-checkpoint": "/models/Qwen3-4B",
    "--actor-num-nodes": "1",
    "--actor-num-gpus-per-node": "8",
    "--colocate": "",
    "--rollout-num-gpus-per-engine": "2",
    "--sglang-mem-fraction-static": "0.7",
    "--sglang-cuda-graph-bs": ["1", "2", "4"],
    "--sglang-enable-metrics": True,
    "--sglang-server-concurrency": "512",
    "--use-fault-tolerance": True,
    "--rollout-health-check-interval": "10",
    "--rollout-health-check-timeout": "30",
    "--rollout-health-check-first-wait": "300",
}
FULLY_ASYNC = {
    "hf_checkpoint": "/models/Qwen3-4B",
    "resource": {
        "actor": [1, 2],
        "rollout": [1, 3],
        "reference": [1, 1],
        "advantages": [1, 0],
        "genrm": [1, 2],
    },
    "fully_async": True,
    "max_staleness": 2,
    "sglang_dtype": "float16",
    "sglang_speculative_algorithm": "EAGLE",
    "sglang_load_format": "dummy",
    "genrm_model_path": "/models/Qwen3-VL-30B-A3B-Instruct/",
    "genrm_num_gpus_per_engine": 1,
    "genrm_engine_config": {
        "max_context_len": 10240,
        "mem_fraction_static": 0.85,
        "server_concurrency": 1024,
    },
    "genrm_sampling_config": {
        "temperature": 0.1,
        "max_response_len": 32,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "autoscaler_config": "autoscaler.yaml",
}
SEVERAL_TEACHERS = {
    "--hf-checkpoint": "/models/Qwen3-0.6B",
    "--colocate": True,
    "--resource": '{"actor": [1, 16], "rollout": [1, 8], "teacher": [1, 8]}',
    "--rollout-num-gpus-per-engine": "1",
    "--num-gpus-per-node": "8",
    "--use-opd": True,
    "--opd-type": "sglang",
    "--opd-teacher-key": "data_source",
    "--opd-teacher-routes": '{"openai/gsm8k": "/models/text/", "hiyouga/geometry3k": "/models/vl/"}',
    "--teacher-num-gpus-per-engine": "2",
    "--teacher-sglang-mem-fraction-static": "0.4",
    "--teacher-sglang-disable-cuda-graph": True,
    "--opd-teacher-timeout-s": "120",
}
DEFERRED = {
    "hf_checkpoint": "/models/student",
    "colocate": True,
    "resource": {"actor": [1, 4], "rollout": [1, 4], "genrm": [1, 4], "teacher": [1, 4]},
    "rollout_num_gpus_per_engine": 2,
    "sglang_enable_weights_cpu_backup": True,
    "defer_reward_to_post_process": True,
    "genrm_model_path": "/models/judge",
    "genrm_num_gpus_per_engine": 2,
    "use_opd": True,
    "opd_type": "sglang",
    "opd_teacher_defer": True,
    "teacher_hf_checkpoint": "/models/teacher",
    "teacher_num_gpus_per_engine": 4,
}


def roles(arguments: dict[str, object]) -> dict[str, InferenceRoleSpec]:
    return {role.role: role for role in from_relax_args(arguments)}


def only(role: InferenceRoleSpec) -> InferenceModelSpec:
    (model,) = role.models
    return model


def bundles(model: InferenceModelSpec) -> list[list[int]]:
    return [list(group.placement.bundle_indices) for group in model.engine_groups]


def test_i60_a_student_that_shares_the_trainers_devices():
    (role,) = from_relax_args(COLOCATED)
    assert (role.role, role.workload) == ("rollout", WorkloadType.ROLLOUT)
    assert role.deployment.placement is PlacementMode.SPLIT
    assert (role.deployment.health_interval_s, role.deployment.health_timeout_s) == (10, 30)
    model = only(role)
    assert model.model_path == "/models/Qwen3-4B"
    assert model.weight_source is WeightSource.ACTOR
    assert model.route_mode is RouteMode.SGLANG_ROUTER and model.router_url is None
    assert model.fault_tolerance_enabled and not model.elastic_enabled
    (group,) = model.engine_groups
    assert (group.engine, group.num_replicas, group.ranks_per_replica) == (EngineKind.SGLANG, 4, 2)
    assert dict(group.engine_args) == {
        "trust_remote_code": True,
        "mem_fraction_static": "0.7",
        "cuda_graph_bs": ["1", "2", "4"],
        "enable_metrics": True,
    }
    assert group.placement.pg_owner is Ownership.CONTROLLER
    assert bundles(model) == [list(range(8))]


def test_i60_a_judge_beside_a_student_in_the_fully_asynchronous_mode():
    found = roles(FULLY_ASYNC)
    assert list(found) == ["rollout", "genrm"]
    student, judge = only(found["rollout"]), only(found["genrm"])
    assert student.weight_source is WeightSource.DCS and student.elastic_enabled
    assert judge.weight_source is WeightSource.STATIC and not judge.elastic_enabled
    assert judge.route_mode is RouteMode.DIRECT
    assert judge.engine_groups[0].num_replicas == 2
    assert dict(judge.sampling_defaults) == {
        "temperature": 0.1,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 32,
    }
    assert dict(judge.chat_template_kwargs) == {"enable_thinking": False}
    assert judge.engine_groups[0].placement.pg_owner is Ownership.MANAGER
    assert found["genrm"].deployment.placement is PlacementMode.DECOUPLED
    assert bundles(judge) == [[0, 1]]


def test_i19_what_is_set_for_rollout_reaches_no_judge_or_teacher():
    arguments = {
        **FULLY_ASYNC,
        "resource": {**FULLY_ASYNC["resource"], "teacher": [1, 1]},
        "use_opd": True,
        "teacher_hf_checkpoint": "/models/teacher",
        "sglang_moe_dense_tp_size": 1,
        "sglang_enable_lora": True,
        "sglang_router_ip": "10.0.0.1",
        "sglang_router_port": 3000,
    }
    poisoned, clean = (
        roles(arguments),
        roles({name: value for name, value in arguments.items() if not name.startswith("sglang_")}),
    )
    assert poisoned["rollout"] != clean["rollout"]
    for name in ("genrm", "teacher"):
        assert poisoned[name] == clean[name]


def test_i60_several_teachers_behind_the_student():
    found = roles(SEVERAL_TEACHERS)
    teacher = found["teacher"]
    assert teacher.routing.route_keys == {
        "openai/gsm8k": "openai-gsm8k",
        "hiyouga/geometry3k": "hiyouga-geometry3k",
    }
    assert teacher.routing.policy is RoutingPolicy.AFFINITY
    text, vision = teacher.models
    assert (text.model_path, vision.model_path) == ("/models/text/", "/models/vl/")
    assert (bundles(text), bundles(vision)) == ([[8, 9, 10, 11]], [[12, 13, 14, 15]])
    assert text.engine_groups[0].num_replicas == 2
    assert dict(text.engine_groups[0].engine_args) == {
        "trust_remote_code": True,
        "mem_fraction_static": "0.4",
        "disable_cuda_graph": True,
    }
    assert teacher.deployment.placement is PlacementMode.SPLIT


def test_i60_roles_that_take_turns():
    found = roles(DEFERRED)
    assert {role.deployment.placement for role in found.values()} == {PlacementMode.DEFER}
    for name, role in found.items():
        (group,) = only(role).engine_groups
        assert list(group.placement.bundle_indices) == [0, 1, 2, 3]
        assert (group.placement.activation_group, group.placement.activation_phase) == (
            "actor",
            name,
        )


def test_i60_judges_by_key():
    instances = {
        "math": {"model_path": "/m", "num_gpus": 2, "num_gpus_per_engine": 2},
        "code judge": {"model_path": "/c", "num_gpus": 2, "engine_config": {"pp_size": 1}},
    }
    arguments = {
        "hf_checkpoint": "/s",
        "resource": {"actor": [1, 8], "rollout": [1, 4], "genrm": [1, 4], "teacher": [1, 0]},
        "colocate": True,
        "genrm_instances": json.dumps(instances),
    }
    genrm = roles(arguments)["genrm"]
    assert genrm.routing.route_keys == {"math": "math", "code judge": "code-judge"}
    assert genrm.routing.default_model is None
    assert [bundles(model) for model in genrm.models] == [[[4, 5]], [[6, 7]]]
    assert [model.engine_groups[0].num_replicas for model in genrm.models] == [1, 2]


def test_i60_engines_and_teachers_that_run_elsewhere():
    found = roles(
        {
            "hf_checkpoint": "/s",
            "rollout_external_engine_addrs": ["10.0.0.1:30000", "10.0.0.2:30000"],
            "sglang_router_ip": "::1",
            "sglang_router_port": 3000,
            "sglang_router_policy": "consistent_hashing",
            "use_opd": True,
            "opd_type": "sglang",
            "opd_teacher_url": "http://10.0.0.9:30000/generate",
        }
    )
    student = only(found["rollout"])
    assert student.engine_groups[0].urls == ("http://10.0.0.1:30000", "http://10.0.0.2:30000")
    assert student.router_url == "http://[::1]:3000"
    assert found["rollout"].routing.policy is RoutingPolicy.AFFINITY
    assert only(found["teacher"]).engine_groups[0].urls == ("http://10.0.0.9:30000",)


def test_i60_prefill_and_decode_engines():
    model = only(
        roles(
            {
                "hf_checkpoint": "/s",
                "rollout_num_gpus": 8,
                "rollout_num_gpus_per_engine": 2,
                "prefill_num_servers": 1,
            }
        )["rollout"]
    )
    prefill, decode = model.engine_groups
    assert (prefill.worker_type, prefill.num_replicas) == (WorkerType.PREFILL, 1)
    assert (decode.worker_type, decode.num_replicas) == (WorkerType.DECODE, 3)
    assert bundles(model) == [[0, 1], [2, 3, 4, 5, 6, 7]]
    assert model.is_disaggregated and model.needs_router


def test_i60_engine_groups_with_a_placeholder():
    groups = [
        {"worker_type": "regular", "num_gpus": 4, "overrides": {"mem_fraction_static": 0.5}},
        {"worker_type": "placeholder", "num_gpus": 2},
        {"worker_type": "regular", "num_gpus": 2, "num_gpus_per_engine": 2},
    ]
    model = only(
        roles(
            {
                "hf_checkpoint": "/s",
                "rollout_num_gpus": 8,
                "sglang_mem_fraction_static": 0.8,
                "sglang_config": {"engine_groups": groups},
            }
        )["rollout"]
    )
    assert bundles(model) == [[0, 1, 2, 3], [6, 7]]
    one, other = model.engine_groups
    assert (one.num_replicas, other.num_replicas) == (4, 1)
    assert one.engine_args["mem_fraction_static"] == 0.5
    assert other.engine_args["mem_fraction_static"] == 0.8


def test_i60_an_engine_larger_than_a_machine():
    model = only(
        roles(
            {
                "hf_checkpoint": "/s",
                "rollout_num_gpus": 32,
                "rollout_num_gpus_per_engine": 16,
                "sglang_pp_size": 2,
            }
        )["rollout"]
    )
    (group,) = model.engine_groups
    assert (group.num_replicas, group.ranks_per_replica, group.nodes_per_replica) == (2, 16, 2)


@pytest.mark.parametrize("hybrid", [True, False])
def test_i60_who_changes_the_weights(hybrid):
    base = {"hf_checkpoint": "/s", "rollout_num_gpus": 1, "actor_num_gpus_per_node": 1}
    asynchronous = {**base, "hybrid": True} if hybrid else {**base, "fully_async": True}
    assert only(roles(asynchronous)["rollout"]).weight_source is WeightSource.DCS
    alone = {**asynchronous, "debug_rollout_only": True}
    assert only(roles(alone)["rollout"]).weight_source is WeightSource.STATIC


def test_no_trainer_side_teacher_is_a_role():
    arguments = {**COLOCATED, "use_opd": True, "opd_type": "megatron"}
    assert list(roles(arguments)) == ["rollout"]


def test_what_comes_of_it_is_what_sglang_is_started_with():
    for role in from_relax_args(DEFERRED):
        model = only(role)
        launch = launch_of(InferenceModelSpec(model.name, "m", model.engine_groups))
        command = engine_command(launch, ListenAddress("127.0.0.1", 1), EnginePrograms())
        size = command.arguments[command.arguments.index("--tp-size") + 1]
        assert int(size) == model.engine_groups[0].ranks_per_replica
        assert "--trust-remote-code" in command.arguments


def test_it_depends_on_nothing_else(monkeypatch):
    before = from_relax_args(DEFERRED)
    monkeypatch.setenv("ROLLOUT_NUM_GPUS", "9")
    monkeypatch.setenv("PHALANX_DEVICE", "cuda:3")
    assert from_relax_args(DEFERRED) == before
    assert from_relax_args(dict(reversed(DEFERRED.items()))) == before
