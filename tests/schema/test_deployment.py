"""Every rule of the deployment values: what is taken, and what each refusal says."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields

import pytest

import phalanx
import phalanx.server
from phalanx import settings
from phalanx.errors import ConfigurationError
from phalanx.schema.deployment import (
    RESERVED_ENV,
    DeploymentConfig,
    NodeResources,
    WorkerSupervisorConfig,
    normalize_device_indices,
)
from phalanx.schema.parallel import ParallelConfig


def refused(build) -> str:
    """What building it says; a configuration error is a `ValueError` for whoever catches that."""
    with pytest.raises(ConfigurationError) as caught:
        build()
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_r25_the_defaults():
    config = DeploymentConfig()
    assert (config.mode, config.replica_count, config.devices) == ("auto", 1, ())
    assert (config.output_rank, config.process_config, config.auto_start) == (0, None, True)
    assert config.supervision == WorkerSupervisorConfig()
    process = WorkerSupervisorConfig()
    assert (process.node_rank, process.master_addr, process.base_port) == (0, "127.0.0.1", 29500)
    assert (process.startup_timeout_s, process.shutdown_timeout_s) == (600.0, 10.0)
    assert (process.execution_timeout_s, process.extra_env) == (None, ())


def test_r21_replicas_belong_to_the_deployment_and_not_to_the_topology():
    assert "replica_count" in {field.name for field in fields(DeploymentConfig)}
    names = {
        field.name
        for part in (ParallelConfig, *(type(p) for p in vars(ParallelConfig()).values()))
        for field in fields(part)
    }
    assert not any("replica" in name for name in names)
    with pytest.raises(TypeError):
        ParallelConfig(replica_count=2)


def test_r30_local_as_the_guide_writes_it():
    process = phalanx.server.WorkerSupervisorConfig(base_port=29500)
    config = phalanx.DeploymentConfig.local(
        devices=(0, 1, 2, 3), replica_count=2, process_config=process
    )
    assert (config.mode, config.devices, config.replica_count) == ("local", (0, 1, 2, 3), 2)
    assert config.supervision is process
    assert phalanx.DeploymentConfig is DeploymentConfig
    assert phalanx.server.DeploymentConfig is DeploymentConfig
    assert DeploymentConfig.local((0,), output_rank=1, auto_start=False) == DeploymentConfig(
        "local", devices=(0,), output_rank=1, auto_start=False
    )


def test_r28_external_as_the_guide_writes_it():
    assert DeploymentConfig.external() == DeploymentConfig("external")
    assert DeploymentConfig.external(output_rank=3).output_rank == 3


def test_process_config_is_legal_without_a_mode():
    config = DeploymentConfig(process_config=WorkerSupervisorConfig(startup_timeout_s=1200))
    assert (config.mode, config.supervision.startup_timeout_s) == ("auto", 1200)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "inline"}, "mode='inline' is not known; allowed: auto, local, external"),
        ({"mode": None}, "mode=None is not known"),
        ({"replica_count": 0}, "replica_count=0 must be an integer, at least 1"),
        ({"replica_count": True}, "replica_count=True"),
        ({"replica_count": 2.0}, "replica_count=2.0"),
        ({"replica_count": "2"}, "replica_count='2'"),
        ({"output_rank": -1}, "output_rank=-1 must be an integer, at least 0"),
        ({"output_rank": False}, "output_rank=False"),
        ({"auto_start": 1}, "auto_start=1 must be True or False"),
        ({"auto_start": None}, "auto_start=None"),
        ({"devices": (0, -1)}, "device -1 must be a non-negative index"),
        (
            {"mode": "external", "devices": (0,)},
            "devices=(0,) cannot be given with mode='external'",
        ),
        (
            {"mode": "external", "replica_count": 2},
            "replica_count=2 cannot be given with mode='ext",
        ),
        (
            {"mode": "external", "process_config": WorkerSupervisorConfig()},
            "cannot be given with mode='external': the launcher looks after its processes",
        ),
        (
            {"process_config": WorkerSupervisorConfig(node_rank=1)},
            "process_config.node_rank=1 must be below num_nodes=1",
        ),
        (
            {"process_config": WorkerSupervisorConfig(base_port=65535), "replica_count": 2},
            "base_port=65535 with replica_count=2 needs ports up to 65536",
        ),
        ({"replica_count": 40000}, "base_port=29500 with replica_count=40000"),
    ],
)
def test_a_wrong_deployment_is_refused(values, message):
    assert message in refused(lambda: DeploymentConfig(**values))


def test_the_last_port_is_allowed():
    process = WorkerSupervisorConfig(base_port=65534)
    assert DeploymentConfig.local(replica_count=2, process_config=process).replica_count == 2


@pytest.mark.parametrize("value", [{"base_port": 29500}, 29500, WorkerSupervisorConfig])
@pytest.mark.parametrize("mode", ["auto", "local", "external"])
def test_a_process_config_of_another_class_is_a_type_error(mode, value):
    with pytest.raises(TypeError, match=r"must be a phalanx\.server\.WorkerSupervisorConfig"):
        DeploymentConfig(mode, process_config=value)


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        ((), ()),
        ((0, 1), (0, 1)),
        ([3, 1], (3, 1)),
        (("0", "12"), (0, 12)),
        (("1", 0), (1, 0)),
        (range(4), (0, 1, 2, 3)),
    ],
)
def test_devices_become_different_indices(devices, indices):
    assert normalize_device_indices(devices) == indices
    assert DeploymentConfig(devices=devices).devices == indices
    assert DeploymentConfig.local(devices).devices == indices


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (("GPU-1faa8c5e",), "device 'GPU-1faa8c5e' must be a non-negative index"),
        (("0,1",), "device '0,1' must be"),
        ((-1,), "device -1"),
        (("-1",), "device '-1'"),
        ((True,), "device True"),
        ((0.0,), "device 0.0"),
        ((None,), "device None"),
        (("٣",), "device '٣'"),
        (("",), "device ''"),
    ],
)
def test_a_device_that_is_no_index_is_refused_with_advice(devices, message):
    text = refused(lambda: normalize_device_indices(devices))
    assert message in text
    assert "set CUDA_VISIBLE_DEVICES for the whole process" in text


@pytest.mark.parametrize("devices", ["0,1", "0", 0, None, {0, 1}, b"01", iter([0])])
def test_devices_must_be_a_sequence(devices):
    with pytest.raises(TypeError, match=r"must be a sequence of device indices, such as \(0, 1\)"):
        normalize_device_indices(devices)


@pytest.mark.parametrize("devices", [(0, 0), (1, "1"), ("2", 0, "02")])
def test_a_device_may_be_given_once_only(devices):
    assert "more than once" in refused(lambda: normalize_device_indices(devices))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"node_rank": -1}, "node_rank=-1 must be an integer, at least 0"),
        ({"node_rank": True}, "node_rank=True"),
        ({"master_addr": ""}, "master_addr='' must be an address"),
        ({"master_addr": "  "}, "master_addr='  '"),
        ({"master_addr": None}, "master_addr=None"),
        ({"base_port": 0}, "base_port=0 must be an integer, from 1 to 65535"),
        ({"base_port": 65536}, "base_port=65536"),
        ({"base_port": "29500"}, "base_port='29500'"),
        ({"base_port": True}, "base_port=True"),
        ({"execution_timeout_s": 0}, "or None for none"),
        ({"extra_env": "A=1"}, "extra_env='A=1' must be a sequence of (name, value) pairs"),
        ({"extra_env": {"A": "1"}}, "must be a sequence of (name, value) pairs"),
        ({"extra_env": ("AB",)}, "extra_env: 'AB' must be a (name, value) pair of strings"),
        ({"extra_env": (("A", 1),)}, "extra_env: ('A', 1) must be"),
        ({"extra_env": (("A",),)}, "extra_env: ('A',) must be"),
        ({"extra_env": (("A=B", "1"),)}, "a name must not be empty or contain ="),
        ({"extra_env": (("", "1"),)}, "must not be empty"),
        ({"extra_env": (("A\0", "1"),)}, "NUL"),
        ({"extra_env": (("A", "1\0"),)}, "NUL"),
        ({"extra_env": (("A", "1"), ("A", "1"))}, "extra_env sets A twice"),
    ],
)
def test_a_wrong_supervisor_configuration_is_refused(values, message):
    assert message in refused(lambda: WorkerSupervisorConfig(**values))


@pytest.mark.parametrize("name", ["startup_timeout_s", "shutdown_timeout_s", "execution_timeout_s"])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "1", True])
def test_a_timeout_must_be_finite_and_positive(name, value):
    message = refused(lambda: WorkerSupervisorConfig(**{name: value}))
    assert message.startswith(f"{name}={value!r} must be a positive, finite number of seconds")


def test_extra_env_becomes_pairs():
    config = WorkerSupervisorConfig(extra_env=[["OMP_NUM_THREADS", "1"], ("B", "")])
    assert config.extra_env == (("OMP_NUM_THREADS", "1"), ("B", ""))


PLACEMENT = (
    "PYTHONPATH", "PYTHONHOME", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "RANK",
    "WORLD_SIZE", "LOCAL_RANK",
)  # fmt: skip


@pytest.mark.parametrize("name", [*PLACEMENT, "PHALANX_DEVICE", "PHALANX_TP_SIZE"])
def test_s8_extra_env_cannot_touch_placement_or_import_paths(name):
    message = refused(lambda: WorkerSupervisorConfig(extra_env=((name, "0"),)))
    assert f"extra_env cannot set {name}" in message


def test_s8_no_variable_that_would_describe_a_topology_is_left_out():
    assert set(RESERVED_ENV) >= {settings.PREFIX + name for name in settings.REMOVED}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": -1, "devices": ()}, "node rank=-1"),
        ({"rank": 0, "devices": (0, 0)}, "more than once"),
        ({"rank": 0, "devices": (0,), "address": " "}, "address=' ' of node 0"),
        ({"rank": 0, "devices": (0,), "address": 7}, "address=7 of node 0"),
    ],
)
def test_wrong_resources_of_a_node_are_refused(values, message):
    assert message in refused(lambda: NodeResources(**values))


@pytest.mark.parametrize(
    "value",
    [
        DeploymentConfig.local((0, 1), process_config=WorkerSupervisorConfig()),
        WorkerSupervisorConfig(extra_env=(("A", "b"),)),
        NodeResources(0, (0, 1), "10.0.0.11"),
    ],
)
def test_values_are_frozen_hashable_and_travel(value):
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(value) == hash(pickle.loads(pickle.dumps(value)))
    with pytest.raises(FrozenInstanceError):
        value.devices = (5,)


@pytest.mark.parametrize("name", phalanx.server.__all__)
def test_a_public_name_of_the_server_package_resolves(name):
    assert getattr(phalanx.server, name) is not None
    assert name in dir(phalanx.server)
    assert set(phalanx.server._HOME) == set(phalanx.server.__all__)


def test_the_server_package_exports_what_the_guide_and_its_reference_name():
    assert set(phalanx.server.__all__) == {
        "DeploymentConfig", "DeploymentPlan", "NodeResources", "WorkerPlacement",
        "normalize_device_indices", "MultiprocessExecutor", "EngineWorkerConfig",
        "engine_worker_factory", "LifecycleState", "WorkerFactorySpec", "WorkerRuntime",
        "WorkerSupervisor", "WorkerSupervisorConfig",
    }  # fmt: skip


def test_an_unknown_name_of_the_server_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'phalanx\.server' has no attribute 'Supervisor'"):
        phalanx.server.Supervisor  # noqa: B018


def test_deployment_types_load_neither_torch_nor_http():
    program = (
        "import sys, phalanx.server as s; "
        "[getattr(s, name) for name in s.__all__]; "
        "print({'torch', 'starlette', 'uvicorn'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_r39_routing_across_machines_is_refused_and_pointed_at_a_gateway():
    assert "put a gateway over several" in refused(
        lambda: DeploymentConfig("external", replica_count=2)
    )
    assert "use a launcher" in refused(
        lambda: DeploymentConfig(process_config=WorkerSupervisorConfig(node_rank=1))
    )
