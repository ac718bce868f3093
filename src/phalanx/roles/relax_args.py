"""Arguments of Relax's training command as role specifications: a pure function, no files and no
environment.

Of a role comes only what was given for it: `sglang_*` goes to rollout engines, `genrm_engine_config`
to judges and `teacher_sglang_*` to teachers. Models are placed one behind the other where roles share
the trainer's devices (`colocate`), with the trainer's controller as the owner of the group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from phalanx.errors import ConfigurationError
from phalanx.roles.relax_flags import ENGINE_PREFIX, TEACHER_PREFIX, RelaxFlags
from phalanx.roles.relax_layout import Layout
from phalanx.schema.roles import (
    DeploymentSpec,
    EngineGroupSpec,
    EngineKind,
    InferenceModelSpec,
    InferenceRoleSpec,
    RouteMode,
    RoutingPolicy,
    RoutingSpec,
    WeightSource,
    WorkerType,
    WorkloadType,
)

DEFAULT_MODEL = "default"
# What Relax gives every engine: its checkpoints may bring code of their own.
_ALWAYS = {"trust_remote_code": True}
_JUDGE_SAMPLING = {"temperature": 0.2, "top_p": 1.0, "top_k": -1, "max_new_tokens": 1024}
_JUDGE_CONFIG_NAMES = {"max_context_len": "context_length"}
_JUDGE_CLIENT = frozenset({"server_concurrency"})
_STICKY = frozenset({"consistent_hashing", "manual"})
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def from_relax_args(arguments: Mapping[str, object]) -> tuple[InferenceRoleSpec, ...]:
    """The roles that the arguments ask for: rollout, and genrm and teacher where they are given.

    Names are those of flags (`--rollout-num-gpus`) or of their attributes (`rollout_num_gpus`);
    values may be words of a command line or parsed ones. Raises `ConfigurationError` for one that is
    not known, or a layout that cannot be.
    """
    flags = RelaxFlags(arguments)
    return roles_of(flags, Layout(flags))


def roles_of(flags: RelaxFlags, layout: Layout) -> tuple[InferenceRoleSpec, ...]:
    """As `from_relax_args`, with a layout that has dealt no devices yet."""
    roles = [_rollout(flags, layout)]
    if "genrm_model_path" in flags or "genrm_instances" in flags:
        roles.append(_genrm(flags, layout))
    teacher = _teacher(flags, layout)
    if teacher is not None:
        roles.append(teacher)
    layout.check()
    return tuple(roles)


def _rollout(flags: RelaxFlags, layout: Layout) -> InferenceRoleSpec:
    path = flags.needed_text("hf_checkpoint", "it is the model that engines start from")
    environment = {}
    package = flags.text("sglang_external_model_package")
    if package is not None:
        environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] = package
    model = InferenceModelSpec(
        name=DEFAULT_MODEL,
        model_path=path,
        engine_groups=_rollout_groups(flags, layout),
        weight_source=_weight_source(flags),
        route_mode=RouteMode.SGLANG_ROUTER,
        router_url=_router_url(flags),
        env_vars=environment,
        elastic_enabled="autoscaler_config" in flags,
        fault_tolerance_enabled=flags.is_on("use_fault_tolerance"),
    )
    policy = flags.text("sglang_router_policy")
    routing = RoutingSpec(
        policy=RoutingPolicy.AFFINITY if policy in _STICKY else RoutingPolicy.LEAST_IN_FLIGHT
    )
    return _role(WorkloadType.ROLLOUT, flags, layout, routing, (model,))


def _rollout_groups(flags: RelaxFlags, layout: Layout) -> tuple[EngineGroupSpec, ...]:
    addresses = flags.texts("rollout_external_engine_addrs")
    if addresses or flags.is_on("rollout_external"):
        if not addresses:
            raise ConfigurationError(
                "--rollout-external is given without --rollout-external-engine-addrs; give the"
                " addresses of the engines"
            )
        urls = tuple(one if "://" in one else f"http://{one}" for one in addresses)
        return (EngineGroupSpec(num_replicas=len(urls), engine=EngineKind.EXTERNAL, urls=urls),)
    args = {**_ALWAYS, **flags.below(ENGINE_PREFIX)}
    ranks = flags.number("rollout_num_gpus_per_engine", 1) or 1
    total = layout.rollout_gpus
    given = flags.mapping("sglang_config").get("engine_groups")
    prefill = flags.number("prefill_num_servers")
    if given is not None and prefill is not None:
        raise ConfigurationError(
            "--sglang-config and --prefill-num-servers are both given; say it in engine_groups"
        )
    if given is not None:
        return _configured_groups(flags, given, args, layout)
    share = layout.share("rollout", total, ranks)
    if not prefill:
        return (share.group(args),)
    if prefill >= share.num_replicas:
        raise ConfigurationError(
            f"--prefill-num-servers={prefill} leaves no engine for decoding of"
            f" {share.num_replicas}; give fewer"
        )
    parts = share.split(prefill)
    kinds = (WorkerType.PREFILL, WorkerType.DECODE)
    return tuple(part.group(args, kind) for part, kind in zip(parts, kinds, strict=True))


def _configured_groups(
    flags: RelaxFlags, given: object, args: Mapping[str, object], layout: Layout
) -> tuple[EngineGroupSpec, ...]:
    """The groups of an --sglang-config, whose content is given; placeholders only keep devices."""
    if not isinstance(given, list) or not all(isinstance(group, dict) for group in given):
        raise flags.wrong("sglang_config", "a mapping with a list of mappings as engine_groups")
    default = flags.number("rollout_num_gpus_per_engine", 1) or 1
    groups = []
    for group in given:
        kind = str(group.get("worker_type", "regular"))
        gpus = int(group.get("num_gpus", 0))
        share = layout.share("rollout", gpus, int(group.get("num_gpus_per_engine", default)))
        if kind == "placeholder":
            continue
        if kind not in {one.value for one in WorkerType}:
            raise ConfigurationError(
                f"--sglang-config: worker_type={kind!r}; allowed: regular, prefill, decode,"
                " placeholder"
            )
        overrides = group.get("overrides") or {}
        groups.append(share.group({**args, **overrides}, WorkerType(kind)))
    layout.check_rollout()
    return tuple(groups)


def _weight_source(flags: RelaxFlags) -> WeightSource:
    """Who changes the weights: the trainer on the same devices, or broadcasts of its own ones."""
    if flags.is_on("debug_rollout_only"):
        return WeightSource.STATIC
    shared = flags.is_on("colocate") and not flags.is_on("hybrid")
    return WeightSource.ACTOR if shared else WeightSource.DCS


def _router_url(flags: RelaxFlags) -> str | None:
    host, port = flags.text("sglang_router_ip"), flags.number("sglang_router_port")
    if host is None:
        return None
    if port is None:
        raise ConfigurationError("--sglang-router-ip is given without --sglang-router-port")
    return f"http://[{host.strip('[]')}]:{port}" if ":" in host else f"http://{host}:{port}"


def _genrm(flags: RelaxFlags, layout: Layout) -> InferenceRoleSpec:
    instances = flags.mapping("genrm_instances")
    if instances and "genrm_model_path" in flags:
        raise ConfigurationError(
            "--genrm-instances and --genrm-model-path are both given; name the one model there too"
        )
    if not instances:
        instances = {
            DEFAULT_MODEL: {
                "model_path": flags.needed_text("genrm_model_path", "it is the judge"),
                "num_gpus": layout.resource("genrm", flags.number("genrm_num_gpus", 1) or 1),
                "num_gpus_per_engine": flags.number("genrm_num_gpus_per_engine", 1),
                "engine_config": flags.mapping("genrm_engine_config"),
                "sampling_config": flags.mapping("genrm_sampling_config"),
            }
        }
    names = _names(instances)
    models = tuple(_judge(names[key], key, spec, layout) for key, spec in instances.items())
    # A single one answers every key, as it does in Relax without one.
    routes = names if len(names) > 1 else {}
    return _role(WorkloadType.GENRM, flags, layout, RoutingSpec(route_keys=routes), models)


def _judge(name: str, key: str, spec: object, layout: Layout) -> InferenceModelSpec:
    if not isinstance(spec, dict) or not isinstance(spec.get("model_path"), str):
        raise ConfigurationError(f"--genrm-instances: {key!r} must be a mapping with a model_path")
    config: dict[str, Any] = dict(spec.get("engine_config") or {})
    sampling: dict[str, Any] = dict(spec.get("sampling_config") or {})
    template = sampling.pop("chat_template_kwargs", None) or {}
    if "max_response_len" in sampling:
        sampling["max_new_tokens"] = sampling.pop("max_response_len")
    share = layout.share(
        "genrm", int(spec.get("num_gpus") or 1), int(spec.get("num_gpus_per_engine") or 1)
    )
    args = {
        _JUDGE_CONFIG_NAMES.get(option, option): value
        for option, value in config.items()
        if option not in _JUDGE_CLIENT
    }
    return InferenceModelSpec(
        name=name,
        model_path=spec["model_path"],
        engine_groups=(share.group({**_ALWAYS, **args}),),
        sampling_defaults={**_JUDGE_SAMPLING, **sampling},
        chat_template_kwargs=template,
    )


def _teacher(flags: RelaxFlags, layout: Layout) -> InferenceRoleSpec | None:
    if not flags.is_on("use_opd") or flags.text("opd_type") == "megatron":
        return None
    routes = flags.mapping("opd_teacher_routes")
    checkpoint = flags.text("teacher_hf_checkpoint")
    urls = flags.texts("opd_teacher_urls") or flags.texts("opd_teacher_url")
    given = [
        name
        for name, value in (
            ("--opd-teacher-routes", routes),
            ("--teacher-hf-checkpoint", checkpoint),
            ("--opd-teacher-url", urls),
        )
        if value
    ]
    if len(given) != 1:
        raise ConfigurationError(
            f"--use-opd needs one of --opd-teacher-routes, --teacher-hf-checkpoint and"
            f" --opd-teacher-url; given: {', '.join(given) or 'none'}"
        )
    routing = RoutingSpec(policy=RoutingPolicy.AFFINITY)
    models: tuple[InferenceModelSpec, ...]
    if urls:
        bases = tuple(url.rstrip("/").removesuffix("/generate") for url in urls)
        group = EngineGroupSpec(num_replicas=len(bases), engine=EngineKind.EXTERNAL, urls=bases)
        models = (InferenceModelSpec(DEFAULT_MODEL, DEFAULT_MODEL, (group,)),)
    elif checkpoint is not None:
        models = _managed_teachers({DEFAULT_MODEL: DEFAULT_MODEL}, [checkpoint], flags, layout)
    else:
        names = _names(routes)
        routing = RoutingSpec(policy=RoutingPolicy.AFFINITY, route_keys=names)
        models = _managed_teachers(names, list(routes.values()), flags, layout)
    return _role(WorkloadType.TEACHER, flags, layout, routing, models)


def _managed_teachers(
    names: Mapping[str, str], paths: list[object], flags: RelaxFlags, layout: Layout
) -> tuple[InferenceModelSpec, ...]:
    """Each has an equal part of the teachers' devices."""
    total = layout.needed_resource("teacher")
    if total % len(paths):
        raise ConfigurationError(
            f"the {total} GPUs of teachers cannot be shared equally by {len(paths)} of them"
        )
    each = total // len(paths)
    ranks = flags.number("teacher_num_gpus_per_engine") or each
    args = {**_ALWAYS, **flags.below(TEACHER_PREFIX)}
    models = []
    for name, path in zip(names.values(), paths, strict=True):
        if not isinstance(path, str):
            raise flags.wrong("opd_teacher_routes", "an object of checkpoints by data source")
        share = layout.share("teacher", each, ranks)
        models.append(InferenceModelSpec(name, path, (share.group(args),)))
    return tuple(models)


def _names(keys: Mapping[str, object]) -> dict[str, str]:
    """A model name for each key, which may be a data source as `openai/gsm8k`."""
    names: dict[str, str] = {}
    for key in keys:
        name = _NO_NAME.sub("-", key).strip("-._") or "model"
        while name in names.values():
            name += "-"
        names[key] = name
    return names


def _role(
    workload: WorkloadType,
    flags: RelaxFlags,
    layout: Layout,
    routing: RoutingSpec,
    models: tuple[InferenceModelSpec, ...],
) -> InferenceRoleSpec:
    usual = DeploymentSpec()
    deployment = DeploymentSpec(
        placement=layout.mode(workload.value),
        health_interval_s=flags.seconds("rollout_health_check_interval", usual.health_interval_s),
        health_timeout_s=flags.seconds("rollout_health_check_timeout", usual.health_timeout_s),
    )
    return InferenceRoleSpec(workload.value, workload, deployment, routing, models)
