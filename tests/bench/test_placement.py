"""The placement benchmark: its command, its jobs, its goals, and a whole run of a small one."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.bench.placement_measuring import (
    GOAL_DEVICES,
    PlacementWorkload,
    goals,
    job,
    measure_placement,
    measures,
)
from phalanx.bench.results import Report, Sample
from phalanx.cli.main import main
from phalanx.errors import ConfigurationError
from phalanx.roles.placement.planner import plan
from phalanx.schema.roles import PlacementMode


def test_the_command_is_known(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "placement", "--help"])
    assert ended.value.code == 0
    assert "--devices" in capsys.readouterr().out


@pytest.mark.parametrize("mode", list(PlacementMode))
@pytest.mark.parametrize("devices", [10, 24, 96])
def test_a_job_takes_all_devices_and_one_more_is_refused(mode, devices):
    made = plan(job(mode, devices))
    used = frozenset().union(*(made.bundles_of(user) for user in made.users()))
    assert len(used) == devices
    with pytest.raises(ConfigurationError, match=f"have {devices}"):
        plan(job(mode, devices, extra=1))


def test_a_goal_is_held_against_each_mode():
    workload = PlacementWorkload((GOAL_DEVICES,), 1)

    def report(value: float) -> Report:
        samples = tuple(
            Sample(measure=f"plan-{GOAL_DEVICES}", system=mode.value, repeat=0, value=value)
            for mode in PlacementMode
        )
        return Report(
            name="placement",
            started="",
            context={},
            systems={mode.value: "" for mode in PlacementMode},
            measures=measures(workload),
            samples=samples,
        )

    assert [goal.met for goal in goals(report(299))] == [True] * 3
    assert [goal.met for goal in goals(report(301))] == [False] * 3


def test_clusters_that_are_too_small_are_refused():
    with pytest.raises(ConfigurationError, match="--devices=4 is too small"):
        PlacementWorkload((4, 10), 1)


def test_a_whole_run_measures_everything(tmp_path):
    folder = measure_placement(PlacementWorkload((10, 16), 2), tmp_path)
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    for mode in PlacementMode:
        for measure in report.measures:
            assert len(report.values(measure.key, mode.value)) == 2
    assert (folder / "report.png").stat().st_size > 0 and (folder / "report.md").exists()
