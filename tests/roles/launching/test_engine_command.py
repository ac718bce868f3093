"""The command of a replica: what it holds of the specification, and that it holds nothing else."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from typer.main import get_command

from phalanx.cli.main import app
from phalanx.errors import ConfigurationError
from phalanx.roles.engine_command import (
    PHALANX_FLAGS,
    PHALANX_OWN,
    EnginePrograms,
    EngineSpan,
    ListenAddress,
    engine_command,
)
from phalanx.schema.roles import (
    EngineGroupSpec,
    EngineKind,
    ModelPlacement,
    Ownership,
    WeightSource,
    WorkerType,
)
from tests.roles.launching.specs import launch_of, model_of, sglang_group

HERE = ListenAddress("127.0.0.1", 4001)
PROGRAMS = EnginePrograms(phalanx=("phalanx", "serve"), sglang=("python", "-m", "sglang"))


def flags(launch, address=HERE) -> list[str]:
    """Without the program."""
    kind = launch.group.engine
    program = PROGRAMS.phalanx if kind is EngineKind.PHALANX else PROGRAMS.sglang
    arguments = engine_command(launch, address, PROGRAMS).arguments
    assert arguments[: len(program)] == program
    return list(arguments[len(program) :])


PHALANX_BASE = ["--model", "m", "--host", "127.0.0.1", "--port", "4001"]
PHALANX_BASE += ["--served-model-name", "student"]
SGLANG_BASE = ["--model-path", *PHALANX_BASE[1:]]


def test_a_static_model_of_ours():
    assert flags(launch_of(model_of())) == [*PHALANX_BASE, "--weight-source", "static"]


@pytest.mark.parametrize("source", [WeightSource.DCS, WeightSource.LOCAL, WeightSource.ACTOR])
def test_one_whose_weights_change_may_be_updated(source):
    assert flags(launch_of(model_of(weight_source=source))) == PHALANX_BASE


@pytest.mark.parametrize("kind", [EngineKind.PHALANX, EngineKind.SGLANG])
def test_machines_of_a_replica_have_their_key_by_the_environment_alone(kind):
    group = EngineGroupSpec(engine=kind, ranks_per_replica=2, nodes_per_replica=2)
    span = EngineSpan(2, 1, "10.0.0.7:5000", "a secret of this replica")
    command = engine_command(launch_of(model_of(group)), HERE, PROGRAMS, span=span)
    told = command.environment.get("PHALANX_NODE_KEY")
    assert told == ("a secret of this replica" if kind is EngineKind.PHALANX else None)
    assert not [word for word in command.arguments if "secret" in word]
    assert "secret" not in repr(span)


def test_engine_args_are_flags_or_dotted_keys():
    group = EngineGroupSpec(
        engine_args={
            "pool_tokens": 4096,
            "max-batch-size": 8,
            "log_json": True,
            "devices": [0, 1],
            "seed": None,
            "plugin_args.page_size": 32,
            "deployment.process_config.extra_env": {"A": "1"},
        }
    )
    assert flags(launch_of(model_of(group, weight_source=WeightSource.DCS))) == [
        *PHALANX_BASE,
        *["--pool-tokens", "4096", "--max-batch-size", "8", "--log-json", "--devices", "0,1"],
        *["--set", "plugin_args.page_size=32"],
        *["--set", 'deployment.process_config.extra_env={"A":"1"}'],
    ]


def test_ranks_and_worker_types_of_ours():
    prefill = EngineGroupSpec(worker_type=WorkerType.PREFILL, ranks_per_replica=2)
    decode = EngineGroupSpec(worker_type=WorkerType.DECODE)
    model = model_of(prefill, decode, weight_source=WeightSource.DCS)
    address = replace(HERE, bootstrap_port=4002)
    assert flags(launch_of(model), address)[len(PHALANX_BASE) :] == [
        *["--role", "prefill", "--bootstrap-port", "4002", "--tp", "2"]
    ]
    assert flags(launch_of(model, 1, group=1))[len(PHALANX_BASE) :] == ["--role", "decode"]


def test_sglang_of_a_static_model_keeps_its_weights():
    assert flags(launch_of(model_of(sglang_group()))) == [
        *SGLANG_BASE,
        *["--enable-memory-saver", "--enable-weights-cpu-backup"],
    ]


def test_sglang_with_arguments():
    group = sglang_group(
        ranks_per_replica=2,
        worker_type=WorkerType.DECODE,
        engine_args={
            "dtype": "bfloat16",
            "trust_remote_code": True,
            "enable_memory_saver": False,
            "lora_paths": ["a", "b"],
            "json_model_override_args": {"x": 1},
        },
    )
    prefill = sglang_group(worker_type=WorkerType.PREFILL)
    model = model_of(group, prefill, weight_source=WeightSource.ACTOR)
    assert flags(launch_of(model)) == [
        *SGLANG_BASE,
        *["--disaggregation-mode", "decode", "--dtype", "bfloat16", "--trust-remote-code"],
        *["--lora-paths", "a", "b", "--json-model-override-args", '{"x":1}', "--tp-size", "2"],
    ]
    assert "--disaggregation-bootstrap-port" in flags(
        launch_of(model, 1, group=1), replace(HERE, bootstrap_port=4002)
    )


@pytest.mark.parametrize("name", sorted(PHALANX_OWN))
def test_what_the_specification_says_cannot_be_said_twice(name):
    group = EngineGroupSpec(engine_args={name: 1})
    with pytest.raises(ConfigurationError, match=f"engine_args has '{name}'; .*, and leave it out"):
        flags(launch_of(model_of(group)))


@pytest.mark.parametrize("name", ["model_path", "port", "nnodes", "disaggregation-mode"])
def test_nor_for_sglang(name):
    with pytest.raises(ConfigurationError, match=f"engine_args has '?{name.replace('-', '.')}"):
        flags(launch_of(model_of(sglang_group(engine_args={name: 1}))))


def test_an_unknown_flag_names_the_nearest():
    group = EngineGroupSpec(engine_args={"pool_token": 1})
    with pytest.raises(ConfigurationError, match=r"'pool_token'.*did you mean 'pool_tokens'\?"):
        flags(launch_of(model_of(group)))


def test_the_known_flags_are_those_of_the_command():
    serve = get_command(app).commands["serve"]
    options = {
        option.removeprefix("--").replace("-", "_")
        for parameter in serve.params
        for option in parameter.opts
        if option.startswith("--")
    }
    of_policies = {"http_port", "gateway", "help", "set", "check"}
    own = {name for name in PHALANX_OWN if "." not in name}
    assert options - of_policies == PHALANX_FLAGS | own


def test_several_machines_are_refused():
    group = EngineGroupSpec(nodes_per_replica=2)
    with pytest.raises(ConfigurationError, match="nodes_per_replica=2, but here.* one machine"):
        flags(launch_of(model_of(group)))


def test_a_checkpoint_that_is_no_directory_is_refused(tmp_path):
    path = str(tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="model_path='.*absent' is no directory"):
        flags(launch_of(model_of(path=path)))


def placed(*gpu_ids: int) -> ModelPlacement:
    return ModelPlacement(Ownership.MANAGER, (0,), gpu_ids, None, None)


def visible(launch) -> str | None:
    environment = engine_command(launch, HERE, PROGRAMS).environment
    return environment.get("CUDA_VISIBLE_DEVICES")


def test_each_replica_sees_its_own_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    two = EngineGroupSpec(num_replicas=2, ranks_per_replica=2, placement=placed(4, 5, 6, 7))
    model = model_of(EngineGroupSpec(num_replicas=3), two)
    assert [visible(launch_of(model, 3 + at, group=1)) for at in range(2)] == ["4,5", "6,7"]
    assert visible(launch_of(model)) == "0,1,2,3,4,5,6,7"
    with pytest.raises(ConfigurationError, match="student/5 needs 2 devices.*give more devices"):
        visible(launch_of(model, 5, group=1))


POISON = {
    "PHALANX_DEVICE": "cuda:7",
    "PHALANX_SEED": "13",
    "PHALANX_PARAMS_DTYPE": "float16",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "1",
    "SGLANG_MOE_DENSE_TP_SIZE": "1",
    "HF_TOKEN": "hf_secret",
    "NCCL_CUMEM_ENABLE": "1",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_PORT": "29500",
    "RAY_ADDRESS": "auto",
}


@pytest.mark.parametrize("kind", [EngineKind.PHALANX, EngineKind.SGLANG])
def test_i19_nothing_that_was_set_for_another_model_reaches_a_static_one(kind, monkeypatch):
    judge = model_of(
        EngineGroupSpec(engine=kind, engine_args={"dtype": "bfloat16"}),
        name="judge",
        env_vars={"JUDGE_ONLY": "1"},
    )
    before = engine_command(launch_of(judge, role="genrm"), HERE, PROGRAMS)
    for name, value in POISON.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["phalanx", "up", "--tp", "8", "--dtype", "float16"])
    rollout = model_of(
        EngineGroupSpec(
            engine=kind,
            engine_args={
                "dtype": "float16",
                "max_batch_size" if kind is EngineKind.PHALANX else "moe_dense_tp_size": 1,
            },
        ),
        weight_source=WeightSource.DCS,
        env_vars={"ROLLOUT_ONLY": "1"},
    )
    theirs = engine_command(launch_of(rollout), HERE, PROGRAMS)
    after = engine_command(launch_of(judge, role="genrm"), HERE, PROGRAMS)
    assert (after.arguments, dict(after.environment)) == (
        before.arguments,
        dict(before.environment),
    )
    assert after.environment["JUDGE_ONLY"] == "1" and "ROLLOUT_ONLY" not in after.environment
    assert theirs.environment["ROLLOUT_ONLY"] == "1" and "JUDGE_ONLY" not in theirs.environment
    assert not set(POISON) & set(after.environment)
    assert "float16" in theirs.arguments and "float16" not in after.arguments


def test_i19_the_model_s_own_variables_win_over_the_machine_s(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    own = model_of(env_vars={"OMP_NUM_THREADS": "7", "PHALANX_DEVICE": "cpu"})
    environment = engine_command(launch_of(own), HERE, PROGRAMS).environment
    assert (environment["OMP_NUM_THREADS"], environment["PHALANX_DEVICE"]) == ("7", "cpu")
    assert (
        engine_command(launch_of(model_of()), HERE, PROGRAMS).environment["OMP_NUM_THREADS"] == "2"
    )


def test_another_interpreter_gets_no_import_path_of_this_one(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    theirs = EnginePrograms.with_sglang("/opt/sglang/bin/python")
    command = engine_command(launch_of(model_of(sglang_group())), HERE, theirs)
    assert command.arguments[:3] == ("/opt/sglang/bin/python", "-m", "sglang.launch_server")
    assert "PYTHONPATH" not in command.environment
    ours = engine_command(launch_of(model_of()), HERE, theirs)
    assert ours.environment["PYTHONPATH"] == "/ours"
