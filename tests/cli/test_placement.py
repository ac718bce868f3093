"""`phalanx serve` and a deployment: flags, what `--check` shows, and the ports it takes."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from phalanx import Engine
from phalanx.cli.placement import device_list, free_base_port, place
from phalanx.engine_config import DeviceConfig, EngineConfig
from phalanx.errors import ConfigurationError
from phalanx.schema.deployment import WorkerSupervisorConfig
from phalanx.schema.deployment_section import DeploymentSection, ProcessSection
from phalanx.schema.launch import Mode
from phalanx.schema.parallel import AttentionParallelConfig, DenseParallelConfig, ParallelConfig
from phalanx.schema.yaml_text import parse_yaml
from phalanx.testing.echo import Echo

CPU = EngineConfig(device=DeviceConfig("cpu", "float32"))
TP_2 = CPU.replace(
    parallel=ParallelConfig(
        dense=DenseParallelConfig(tp_size=2), attention=AttentionParallelConfig(tp_size=2)
    )
)


class Cut(Echo):
    """Runs over the ranks of a tensor-parallel replica."""

    name = "cut"
    parallel_domains = frozenset({"dense", "attention"})


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    Engine.register(Echo)
    Engine.register(Cut)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("plugin: cut\n")
    return str(path)


def comments(text: str) -> list[str]:
    return [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]


def test_check_of_the_simplest_says_that_it_runs_inline(run, file):
    code, out, _ = run("serve", file, "--check")
    assert code == 0
    assert comments(out) == ["inline: replica 0 rank 0 in this process, on cpu"]


def test_r27_r31_check_shows_which_rank_runs_on_which_device(run, file, tmp_path):
    flags = ("--replicas", "2", "--tp", "2", "--devices", "3, 2,1,0", "--base-port", "31000")
    code, out, err = run("serve", file, "--check", *flags)
    assert (code, err) == (0, "")
    assert comments(out) == [
        "local: replica 0 rank 0 on cpu, answers",
        "local: replica 0 rank 1 on cpu",
        "local: replica 1 rank 0 on cpu, answers",
        "local: replica 1 rank 1 on cpu",
    ]
    printed = parse_yaml(out, "out")
    assert printed["deployment"]["devices"] == ["3", "2", "1", "0"]
    assert printed["deployment"]["replica_count"] == 2
    assert printed["deployment"]["process_config"]["base_port"] == 31000
    assert printed["parallel"]["dense"]["tp_size"] == 2
    assert printed["parallel"]["attention"]["tp_size"] == 2
    assert printed["parallel"]["moe"]["tp_size"] is None
    again = tmp_path / "again.yaml"
    again.write_text(out)
    assert run("serve", str(again), "--check") == (0, out, "")


def test_flags_win_over_the_file(run, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "plugin: cut\ndeployment: {replica_count: 3, output_rank: 1}\n"
        "parallel: {dense: {tp_size: 4}}\n"
    )
    code, out, _ = run("serve", str(path), "--check", "--replicas", "1", "--tp", "2")
    assert code == 0
    assert comments(out) == [
        "local: replica 0 rank 0 on cpu",
        "local: replica 0 rank 1 on cpu, answers",
    ]


def test_r17_a_topology_that_the_plugin_cannot_run_is_refused(run, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("plugin: echo\n")
    code, _, err = run("serve", str(path), "--check", "--tp", "2")
    assert code == 2
    assert "plugin 'echo' cannot run this topology" in err
    path.write_text("plugin: cut\nparallel: {outer: {cfg_size: 2}}\n")
    code, _, err = run("serve", str(path), "--check")
    assert code == 2
    assert "outer.cfg_size=2 splits the undeclared domain 'cfg'" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--replicas", "0"), "deployment: replica_count=0 must be an integer, at least 1"),
        (("--tp", "0"), "parallel.dense: dense.tp_size=0 must be a positive integer"),
        (("--devices", "0,0"), "more than once"),
        (("--devices", "GPU-1"), "set CUDA_VISIBLE_DEVICES for the whole process"),
        (("--devices", "0", "--replicas", "2"), "needs 2 worker slots"),
        (("--base-port", "70000"), "base_port=70000 must be an integer, from 1 to 65535"),
        (("--set", "deployment.output_rank=1"), "output_rank=1 must be a rank of the replica"),
        (("--set", "deployment.replicas=2"), "did you mean deployment.replica_count?"),
        (
            ("--set", "deployment.mode=external", "--tp", "1", "--replicas", "2"),
            "replica_count=2 cannot be given with mode='external'",
        ),
    ],
)
def test_a_wrong_deployment_ends_with_one_line(run, file, flags, message):
    code, out, err = run("serve", file, "--check", *flags)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_s3_a_launchers_rank_is_refused(run, file, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run("serve", file, "--check")
    assert code == 2
    assert "a launcher started this process (RANK=1, WORLD_SIZE=2)" in err
    code, _, err = run("serve", file, "--check", "--tp", "2", "--set", "deployment.mode=external")
    assert code == 2
    assert "each rank needs the same requests" in err


def test_a_device_that_this_machine_does_not_have_is_refused(run, file):
    code, _, err = run("serve", file, "--check", "--device", "cuda", "--devices", "99")
    assert code == 2
    assert "device 99 of devices=(99,) does not exist: this process sees" in err


def test_ports_are_chosen_where_ranks_meet_and_none_was_named():
    placement = place(DeploymentSection(replica_count=2), TP_2)
    assert placement.mode is Mode.LOCAL
    assert placement.deployment.process_config is None
    process = placement.with_ports().process_config
    assert process is not None
    assert process == WorkerSupervisorConfig(base_port=process.base_port)
    for port in (process.base_port, process.base_port + 1):
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.parametrize(
    ("section", "config"),
    [
        (DeploymentSection(), CPU),
        (DeploymentSection(replica_count=2), CPU),
        (DeploymentSection(process_config=ProcessSection(base_port=31000)), TP_2),
    ],
)
def test_otherwise_the_deployment_is_what_was_asked_for(section, config):
    assert place(section, config).with_ports() == section.deployment_config()


def test_free_ports_are_neighbours_and_none_is_in_use():
    """Whatever ports the machine has taken, those found can all be bound at once."""
    first = free_base_port("127.0.0.1", 5)
    with ExitStack() as servers:
        for port in range(first, first + 5):
            servers.enter_context(socket.create_server(("127.0.0.1", port)))
        taken = range(first, first + 5)
        second = free_base_port("127.0.0.1", 2)
        assert not {second, second + 1} & set(taken)


def test_a_port_whose_neighbour_is_in_use_is_passed_over():
    first = free_base_port("127.0.0.1", 2)
    with socket.create_server(("127.0.0.1", first + 1)):
        found = free_base_port("127.0.0.1", 2, tries=(first, *[0] * 8))
        assert found not in (first, first + 1)
        with pytest.raises(ConfigurationError, match="found no 2 neighbouring free ports"):
            free_base_port("127.0.0.1", 2, tries=(first,))


def test_the_last_port_has_no_neighbour():
    with pytest.raises(ConfigurationError, match="found no 2 neighbouring free ports"):
        free_base_port("127.0.0.1", 2, tries=(65535,))


def test_an_address_of_another_machine_has_no_ports():
    with pytest.raises(ConfigurationError, match=r"master_addr='192\.0\.2\.1'.*of this machine"):
        free_base_port("192.0.2.1", 1)


def test_more_replicas_than_ports_are_refused():
    with pytest.raises(ConfigurationError, match="found no 70000 neighbouring free ports"):
        free_base_port("127.0.0.1", 70000)


@pytest.mark.parametrize(
    ("text", "entries"), [("0,1", ["0", "1"]), (" 3 , 1,", ["3", "1"]), ("", [])]
)
def test_a_list_of_devices_as_a_flag(text, entries):
    assert device_list(text) == entries
