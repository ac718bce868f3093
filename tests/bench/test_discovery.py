"""The discovery benchmark: its command, its goals, and a whole run with a small crowd."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from phalanx.bench.discovery_followers import Crowd
from phalanx.bench.discovery_measuring import (
    ANSWER,
    MEASURES,
    OURS,
    TURN,
    DiscoveryWorkload,
    goals,
    large_role,
    measure_discovery,
)
from phalanx.bench.results import Report, Sample
from phalanx.cli.main import main
from phalanx.routing.roles.encoded import EncodedSnapshot
from phalanx.routing.roles.registry import RoleRegistry


def test_the_command_is_known(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "discovery", "--help"])
    assert ended.value.code == 0
    assert "--followers" in capsys.readouterr().out


@pytest.mark.parametrize("compressed", [True, False])
def test_every_follower_gets_the_newest_document_once(compressed):
    async def scenario():
        registry = RoleRegistry("rollout", "e", large_role(40))
        crowd = Crowd(registry, 200, compressed=compressed)
        crowd.ask()
        await crowd.asked()
        registry.publish(large_role(41), 0)
        await crowd.answered()
        expected = EncodedSnapshot(registry.snapshot)
        body = expected.compressed if compressed else expected.discovery
        assert crowd.last_body.endswith(body)
        assert crowd.num_bytes == 200 * len(crowd.last_body)
        crowd.leave()
        assert registry.num_waiting == 0

    asyncio.run(scenario())


def test_a_role_has_as_many_replicas_as_it_is_asked_for():
    for count in (1, 3, 10):
        content = large_role(count)
        ids = [one.engine_id for model in content.models for one in model.replicas]
        assert len(set(ids)) == count


def test_goals_are_held_against_the_crowd_that_accepts_compression():
    def report(turn_ms: float, answer_us: float) -> Report:
        values = ((TURN, turn_ms), (ANSWER, answer_us))
        return Report(
            name="discovery",
            started="",
            context={},
            systems={OURS: ""},
            measures=MEASURES,
            samples=tuple(
                Sample(measure=measure.key, system=OURS, repeat=0, value=value)
                for measure, value in values
            ),
        )

    assert [goal.met for goal in goals(report(49, 99))] == [True, True]
    assert [goal.met for goal in goals(report(51, 101))] == [False, False]


@pytest.mark.long
def test_a_whole_run_measures_everything(tmp_path):
    folder = measure_discovery(DiscoveryWorkload(20, 30, 2, 2), tmp_path)
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    for system in report.systems:
        for measure in MEASURES:
            assert len(report.values(measure.key, system)) == 2
    assert (folder / "report.png").stat().st_size > 0 and (folder / "report.md").exists()
