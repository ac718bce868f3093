"""`roles.yaml`: what it becomes, and how mistakes in it are named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.config import parse_job
from phalanx.schema.roles import (
    EngineKind,
    InferenceRoleSpec,
    RouteMode,
    RoutingPolicy,
    UnmappedRouteKey,
    WeightSource,
    WorkerType,
    WorkloadType,
)

WHOLE = """
gateway: {http_host: 127.0.0.2, http_port: 0, api_key: k, tls_cert: ./cert.pem, tls_key: /key.pem}
control: {port: 7000, key: secret}
log: {level: DEBUG, directory: ../logs}
launcher: {sglang_python: ~/sglang/bin/python, router_python: python3}
roles:
  rollout:
    deployment: {drain_timeout_s: 3, start_asleep: true}
    models:
      student:
        model: ./checkpoints/student
        replicas: 2
        ranks: 2
        weight_source: dcs
        engine_args: {pool_tokens: 64}
        env: {OMP_NUM_THREADS: 1}
        served_model_name: s
        elastic: false
        fault_tolerance: false
  scorer:
    workload: genrm
    expose_engine_urls: false
    routing:
      default_model: judge
      route_keys: {math: other}
      aliases: {j: judge}
      policy: affinity
      on_unmapped_route_key: default
    models:
      judge: {model: smollm2-135m, sampling: {temperature: 0.2}, chat_template_kwargs: {enable_thinking: false}}
      other: {engine: external, urls: ["http://127.0.0.1:1/", "http://127.0.0.1:2"]}
  teacher:
    models:
      big:
        model: org/name
        route_mode: sglang_router
        groups:
          - {worker_type: prefill, engine: sglang}
          - {worker_type: decode, engine: sglang, replicas: 3}
"""


def roles(text: str = WHOLE, directory: Path | None = None) -> dict[str, InferenceRoleSpec]:
    return {role.role: role for role in parse_job(text, "r.yaml", directory).roles}


def test_i9_the_file_becomes_the_specs_that_know_nothing_of_it():
    made = roles(directory=Path("/home/me"))
    assert list(made) == ["rollout", "scorer", "teacher"]
    rollout = made["rollout"]
    assert rollout.workload is WorkloadType.ROLLOUT
    assert (rollout.deployment.drain_timeout_s, rollout.deployment.start_asleep) == (3.0, True)
    (student,) = rollout.models
    assert student.name == "student"
    assert student.model_path == "/home/me/checkpoints/student"
    assert student.weight_source is WeightSource.DCS
    assert student.env_vars == {"OMP_NUM_THREADS": "1"}
    assert student.public_name == "s"
    assert not (student.elastic_enabled or student.fault_tolerance_enabled)
    (group,) = student.engine_groups
    assert (group.num_replicas, group.ranks_per_replica) == (2, 2)
    assert group.engine_args == {"pool_tokens": 64}
    assert group.engine is EngineKind.PHALANX


def test_i10_a_role_holds_models_and_a_model_groups():
    made = roles()
    scorer, (big,) = made["scorer"], made["teacher"].models
    assert scorer.workload is WorkloadType.GENRM
    assert not scorer.expose_engine_urls
    assert scorer.routing.policy is RoutingPolicy.AFFINITY
    assert scorer.routing.on_unmapped_route_key is UnmappedRouteKey.DEFAULT
    assert (scorer.routing.route_keys, scorer.routing.aliases) == (
        {"math": "other"},
        {"j": "judge"},
    )
    judge, other = scorer.models
    assert judge.model_path == "smollm2-135m"
    assert judge.weight_source is WeightSource.STATIC
    assert judge.sampling_defaults == {"temperature": 0.2}
    assert judge.chat_template_kwargs == {"enable_thinking": False}
    assert judge.elastic_enabled
    assert judge.fault_tolerance_enabled
    assert other.engine_groups[0].urls == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert other.engine_groups[0].num_replicas == 2
    assert big.route_mode is RouteMode.SGLANG_ROUTER
    assert [(group.worker_type, group.num_replicas) for group in big.engine_groups] == [
        (WorkerType.PREFILL, 1),
        (WorkerType.DECODE, 3),
    ]


def test_the_other_sections_are_read_and_their_paths_begin_at_the_file():
    job = parse_job(WHOLE, "r.yaml", Path("/home/me"))
    assert job.gateway.tls_cert == "/home/me/cert.pem"
    assert job.gateway.tls_key == "/key.pem"
    assert (job.control.port, job.control.key) == (7000, "secret")
    assert (job.log.level, job.log.directory) == ("DEBUG", "/home/logs")
    assert job.launcher.sglang_python == str(Path("~/sglang/bin/python").expanduser())
    assert job.launcher.router_python == "python3"


@pytest.mark.parametrize(
    ("given", "means"),
    [(each.value, each) for each in WorkloadType],
)
def test_a_role_of_a_known_name_needs_no_workload(given, means):
    assert roles(f"roles: {{{given}: {{models: {{a: {{model: x}}}}}}}}")[given].workload is means


def model(text: str) -> str:
    return f"roles: {{rollout: {{models: {{a: {{{text}}}}}}}}}"


IN_MODEL = "roles.rollout.models.a"


def test_sampling_is_taken_by_the_names_of_generate_and_of_chats():
    given = "{max_tokens: 4, min_new_tokens: 2, temperature: 0, stop: [a], custom_params: {b: 1}}"
    (role,) = parse_job(model(f"model: x, sampling: {given}"), "r.yaml").roles
    assert role.models[0].sampling_defaults["max_tokens"] == 4
    parse_job(model("model: x, sampling: {min_new_tokens: 2000}"), "r.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must hold a mapping with the key roles"),
        ("[]", "must hold a mapping with the key roles"),
        ("role: {}", "r.yaml: unknown key role; did you mean roles?"),
        (
            "{plugin: p}",
            "r.yaml is the file of a server, not of a job; `phalanx serve` serves it",
        ),
        ("{gateway: {}}", "must hold a mapping with the key roles"),
        ("roles: {}", "roles is empty"),
        ("roles: []", "roles: expected `object`, got `array`"),
        ("roles: {rollout: 1}", "roles.rollout must hold keys of its own"),
        ("roles: {rollout: {}}", "roles.rollout.models is empty"),
        ("roles: {rollout: {modles: {}}}", "did you mean roles.rollout.models?"),
        ("roles: {rollout: {models: {a: }}}", f"{IN_MODEL} must hold keys of its own"),
        ("roles: {rollout: {models: {1: {model: x}}}}", "roles.rollout.models.1 must be a name"),
        (
            "roles: {judge: {models: {a: {model: x}}}}",
            "roles.judge: workload is missing; it is one",
        ),
        (
            "roles: {rolout: {models: {a: {model: x}}}}",
            "teacher, or did you mean to call the role rollout?",
        ),
        (
            "roles: {judge: {workload: ppo, models: {a: {}}}}",
            "workload='ppo' is not known; allowed",
        ),
        ("{gatway: {}, roles: {}}", "unknown key gatway; did you mean gateway?"),
        ("{gateway: {port: 1}, roles: {}}", "did you mean gateway.http_port?"),
        ("{control: {port: 70000}, roles: {}}", "control: port=70000 must be from 0 to 65535"),
        ("{control: {key: ''}, roles: {}}", "control: key must be printable ASCII"),
        ("{log: {level: LOUD}, roles: {}}", "log: level='LOUD' is not known; allowed: DEBUG"),
        (model(""), f"{IN_MODEL}: model is missing"),
        (model("modle: x"), f"unknown key {IN_MODEL}.modle; did you mean {IN_MODEL}.model?"),
        (
            model("model: x, replicas: two"),
            f"{IN_MODEL}.replicas: expected `int | null`, got `str` (it is 'two')",
        ),
        (model("model: x, replicas: -1"), f"{IN_MODEL}.replicas=-1 must be at least 0"),
        (model("model: x, ranks: 0"), f"{IN_MODEL}.ranks=0 must be at least 1"),
        (model("model: x, engine: vllm"), f"{IN_MODEL}.engine='vllm' is not known; allowed: ph"),
        (
            model("model: x, sampling: {temprature: 1}"),
            f"unknown key {IN_MODEL}.sampling.temprature; did you mean"
            f" {IN_MODEL}.sampling.temperature?",
        ),
        (
            model("model: x, sampling: {temperature: hot}"),
            f"{IN_MODEL}.sampling.temperature: expected `float | null`",
        ),
        (
            model("model: x, sampling: {top_p: 2}"),
            f"{IN_MODEL}.sampling.top_p: top_p=2.0 must be a finite number",
        ),
        (
            model("model: x, sampling: {max_tokens: 1, max_new_tokens: 1}"),
            f"{IN_MODEL}.sampling has max_new_tokens twice",
        ),
        (model("model: x, env: {A: true}"), "env.A=True must be text or a number"),
        (model("model: x, groups: [1]"), f"{IN_MODEL}.groups[0] must hold keys of its own"),
        (
            model("model: x, groups: [{worker: 1}]"),
            f"did you mean {IN_MODEL}.groups[0].worker_type?",
        ),
        (model("model: x, replicas: 2, groups: [{}]"), "replicas and groups are both given"),
        (
            model("model: x, groups: [{worker_type: prefill}]"),
            "give prefill and decode, or regular",
        ),
        (model("model: x, router_url: http://r:1"), "a router is used with sglang_router"),
        (model("engine: external"), "engine: external needs urls"),
        (model("engine: external, urls: [h:1]"), "'h:1' must be a url as http://HOST:PORT"),
        (model("engine: external, urls: ['http://u@h:1']"), "is given with a user"),
        (model("engine: external, urls: ['http://h:1'], replicas: 2"), "has 1 urls"),
        (
            model("engine: external, urls: ['http://h:1', 'http://h:1/']"),
            "http://h:1 is given twice",
        ),
        (
            "roles: {rollout: {deployment: {drain_timeout_s: 0}, models: {a: {model: x}}}}",
            "roles.rollout.deployment: drain_timeout_s=0.0 must be a finite number above 0",
        ),
        (
            "roles: {rollout: {deployment: {placement: defer}, models: {a: {model: x}}}}",
            "roles.rollout.deployment.placement='defer', and the job's placement is decoupled; leave",
        ),
        (
            "roles: {rollout: {routing: {polcy: x}, models: {a: {model: x}}}}",
            "did you mean roles.rollout.routing.policy?",
        ),
        (
            "roles: {rollout: {routing: {policy: random}, models: {a: {model: x}}}}",
            "roles.rollout.routing.policy='random' is not known; allowed: least_in_flight, affinity",
        ),
        (
            "roles: {rollout: {routing: {route_keys: {m: b}}, models: {a: {model: x}}}}",
            "roles.rollout: routing.route_keys['m']='b' is not a model",
        ),
        ("roles: {v1: {workload: genrm, models: {a: {model: x}}}}", "a path of the gateway's own"),
        ("roles: {a b: {workload: genrm, models: {a: {model: x}}}}", "role name 'a b' must begin"),
    ],
)
def test_i9_mistakes_are_named_with_their_place(text, says):
    with pytest.raises(ConfigurationError) as refused:
        parse_job(text, "r.yaml")
    assert str(refused.value).startswith("r.yaml")
    assert str(refused.value).count("r.yaml") == 1
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_specs_are_equal_where_the_text_is_and_frozen():
    first, second = parse_job(WHOLE, "a"), parse_job(WHOLE, "b")
    assert first == second
    with pytest.raises(AttributeError):
        first.roles[0].role = "other"
    with pytest.raises(AttributeError):
        first.gateway.http_port = 1
    assert msgspec.structs.asdict(first.gateway) == msgspec.structs.asdict(second.gateway)
