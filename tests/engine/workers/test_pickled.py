"""What workers are started with is pickled once, and refused before anything runs."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass, field

import pytest

from phalanx import DeploymentConfig, DeviceConfig, EngineConfig, RuntimeConfig
from phalanx.clock import SystemClock
from phalanx.engine.deployments.local import LocalDeployment
from phalanx.engine.requests import RequestTable
from phalanx.engine.workers.launch import plan_launches
from phalanx.engine.workers.pickled import Pickled
from phalanx.errors import ConfigurationError
from phalanx.schema.deployment import WorkerSupervisorConfig
from phalanx.testing.faulty import Faulty, FaultyArgs


@dataclass(frozen=True)
class Args(FaultyArgs):
    """`counter` is told of each time that these are pickled."""

    counter: list[int] = field(default_factory=list)

    def __reduce__(self):
        self.counter.append(1)
        return Args, ()


@dataclass(frozen=True)
class Refusing:
    """Pickling raises what nobody expects."""

    def __reduce__(self):
        raise ZeroDivisionError("by nothing")


def deployment(args):
    runtime = RuntimeConfig(num_threads=1)
    clock = SystemClock()
    return LocalDeployment(
        Faulty,
        args,
        EngineConfig(DeviceConfig("cpu", "float32"), runtime),
        DeploymentConfig.local(replica_count=3),
        RequestTable(clock, runtime),
        clock,
    )


def test_the_arguments_of_a_plugin_are_pickled_once_for_all_workers():
    args = Args()
    local = deployment(args)
    launches = plan_launches(local._plan, local._factory, WorkerSupervisorConfig(), "cpu")
    assert len(launches) == 3 and args.counter == [1]
    for launch in launches:
        spec = pickle.loads(pickle.dumps(launch.boot.factory)).load()
        assert spec.config.plugin_args.load() == Args()
    assert args.counter == [1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (threading.Lock(), "log is a lock: TypeError: cannot pickle"),
        (Refusing(), "log is a Refusing: ZeroDivisionError: by nothing"),
        (lambda: None, "is a function: "),
    ],
)
def test_arguments_that_cannot_be_pickled_are_refused_whatever_pickling_raises(value, text):
    with pytest.raises(ConfigurationError, match="plugin_args of plugin 'faulty'") as caught:
        deployment(FaultyArgs(log=value))
    assert text in str(caught.value)


def test_a_value_without_parts_is_named_by_what_was_raised():
    with pytest.raises(ConfigurationError, match="^it cannot be .* given it: TypeError: cannot"):
        Pickled.of(threading.Lock(), "it")
