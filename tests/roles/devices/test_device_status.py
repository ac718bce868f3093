"""What a job's status says of its simulated devices."""

from __future__ import annotations

from rich.text import Text

from phalanx.cli.device_lines import device_lines
from phalanx.device_ledger import MIB
from phalanx.roles.control_messages import DeviceStatus, HeldMemory
from phalanx.roles.device_view import DeviceView
from phalanx.roles.replica_devices import SimulatedCluster
from phalanx.schema.roles import EngineGroupSpec, PlacementMode
from tests.roles.devices.test_replica_devices import planned, role


def test_each_device_of_each_node_says_who_holds_how_much(tmp_path):
    made = planned(
        PlacementMode.DEFER,
        (1, 2),
        role("rollout", EngineGroupSpec(num_replicas=3)),
        memory=100 * MIB,
    )
    cluster = SimulatedCluster(made, tmp_path / "devices")
    view = DeviceView(made, cluster)
    assert view.status() == ()  # not made yet
    ledger = cluster.make()
    ledger.take(1, "rollout/student/1", "weights", 60 * MIB)
    ledger.take(1, "rollout/student/1", "kv_cache", 5 * MIB)
    ledger.give(1, "rollout/student/1", "kv_cache")
    first, second, third = view.status()
    assert (first.node, first.device, first.peak_bytes, first.held) == ("node0", 0, 0, ())
    assert (second.node, second.device, second.peak_bytes) == ("node1", 0, 65 * MIB)
    assert [(one.owner, one.tag) for one in second.held] == [("rollout/student/1", "weights")]
    assert (third.node, third.device, third.budget_bytes) == ("node1", 1, 100 * MIB)
    assert view.trainer_environment()["PHALANX_SIMULATED_DEVICES"].endswith(":1,2@trainer")


def test_real_devices_have_no_status_and_the_trainer_is_told_of_its_own():
    made = planned(
        PlacementMode.DEFER, (4,), role("rollout", EngineGroupSpec(num_replicas=4)), memory=None
    )
    view = DeviceView(made)
    assert view.status() == ()
    assert view.trainer_environment() == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert DeviceView().trainer_environment() == {}


def test_of_devices_whose_memory_nobody_knows_it_says_so():
    devices = (
        DeviceStatus("a", 0, 900 * MIB, 0, place="10.0.0.7:2"),
        DeviceStatus("a", 1, place="10.0.0.8:0", unknown="its machine does not answer"),
    )
    assert [line.plain for line in device_lines(devices)] == [
        "devices of 900 MiB (simulated)",
        "a:0 at 10.0.0.7:2  0 MiB held, 0 MiB at most",
        "a:1 at 10.0.0.8:0  its machine does not answer",
    ]
    assert next(device_lines(devices[1:])).plain == "devices"


def test_lines_for_people():
    held = (
        HeldMemory("teacher/big/0", "weights", 600 * MIB, 7),
        HeldMemory("teacher/big/0", "kv_cache", 5 * MIB, 7),
    )
    devices = (
        DeviceStatus("a", 0, 900 * MIB, 700 * MIB, held),
        DeviceStatus("long", 0, 900 * MIB, 0),
    )
    assert [line.plain for line in device_lines(devices)] == [
        "devices of 900 MiB (simulated)",
        "a:0     605 MiB held, 700 MiB at most  teacher/big/0 (weights 600 MiB, kv_cache 5 MiB)",
        "long:0  0 MiB held, 0 MiB at most",
    ]
    assert list(device_lines(())) == []
    assert all(isinstance(line, Text) for line in device_lines(devices))
