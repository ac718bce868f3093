"""The gateway benchmark: flags, goals, and a whole run with tiny counts."""

from __future__ import annotations

import shutil
from dataclasses import replace

import msgspec
import pytest

from phalanx.bench.gateway import gateway
from phalanx.bench.gateway_goals import goals
from phalanx.bench.gateway_measuring import measure_gateway
from phalanx.bench.gateway_phases import SLOW_SHARE, Through
from phalanx.bench.gateway_systems import PEERS, find_programs
from phalanx.bench.gateway_workload import PARTS, TRAFFIC, GatewayWorkload
from phalanx.bench.results import Report, Sample
from phalanx.cli.main import main
from phalanx.errors import ConfigurationError, MissingDependencyError

TINY = GatewayWorkload(
    traffic=tuple(replace(each, num_alone=5, num_together=10, concurrency=2) for each in TRAFFIC),
    repeats=1,
    num_balanced=20,
    delays_s=(0.02, 0.001),
)


def test_what_is_unknown_or_not_installed_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDependencyError, match="scripts/peer_env.py router"):
        gateway(against="sglang-router")
    with pytest.raises(MissingDependencyError, match="scripts/peer_env.py proxies"):
        gateway(against="vllm-router,envoy")
    with pytest.raises(ConfigurationError, match="--against: 'squid' is not known; allowed: nginx"):
        gateway(against="squid")
    with pytest.raises(ConfigurationError, match="--only: 'speed' is not known; .*balance"):
        gateway(only="speed")
    with pytest.raises(ConfigurationError, match="nothing to measure"):
        gateway(only="")
    with pytest.raises(ConfigurationError, match="--program 'nginx' must be NAME=PATH"):
        gateway(program=["nginx"])
    with pytest.raises(ConfigurationError, match="there is no such file"):
        gateway(program=["nginx=/nowhere/nginx"])


def test_the_command_is_known(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "gateway", "--help"])
    assert ended.value.code == 0
    assert "--against" in capsys.readouterr().out


def test_goals_are_held_against_the_peer_of_the_same_run():
    json_traffic = TRAFFIC[0]
    cpu, added, _ = Through(json_traffic, 1).measures

    def report(ours: float, theirs: float, share: float) -> Report:
        values = (("phalanx", cpu, ours), ("nginx", cpu, theirs), ("phalanx", SLOW_SHARE, share))
        return Report(
            name="gateway",
            started="",
            context={},
            systems={"phalanx": "", "nginx": ""},
            measures=(cpu, added, SLOW_SHARE),
            samples=tuple(
                Sample(measure=measure.key, system=system, repeat=0, value=value)
                for system, measure, value in values
            ),
        )

    met = goals(report(ours=31.0, theirs=20.0, share=15.0))
    assert [(goal.met, goal.result) for goal in met] == [(True, "1.55 times"), (True, "15 at most")]
    missed = goals(report(ours=33.0, theirs=20.0, share=16.0))
    assert [goal.met for goal in missed] == [False, False]


@pytest.mark.long
def test_a_whole_run_measures_every_part(tmp_path):
    peers = [
        peer
        for name, peer in PEERS.items()
        if "router" not in name and shutil.which(peer.program, path="/usr/sbin:/usr/bin")
    ]
    folder = measure_gateway(peers, find_programs(peers, {}), TINY, PARTS, tmp_path)
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    for system in report.systems:
        for measure in report.measures:
            assert len(report.values(measure.key, system)) == TINY.repeats
    assert all(report.values(f"{each.key}_cpu", "phalanx")[0] > 0 for each in TRAFFIC)
    assert (folder / "report.png").stat().st_size > 0 and (folder / "report.md").exists()
