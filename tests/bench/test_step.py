"""The step benchmark: a whole run with tiny counts, its goals, and what it refuses."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.bench.idle_model import IdleRequest, idle_loop
from phalanx.bench.results import Report, Sample
from phalanx.bench.step import step
from phalanx.bench.step_overhead import (
    AHEAD,
    OURS,
    REST,
    SHARE,
    STAGES,
    goals,
    measure_steps,
    own_key,
    stage_key,
)
from phalanx.errors import ConfigurationError


def test_a_run_tells_the_own_time_and_each_stage_of_every_size(tmp_path, capsys):
    folder = measure_steps((1, 3), 4, 2, None, tmp_path)
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    assert {file.name for file in folder.iterdir()} == {"report.json", "report.md", "report.png"}
    keys = {own_key(rows) for rows in (1, 3)}
    keys |= {stage_key(stage, rows) for stage in (*STAGES, REST) for rows in (1, 3)}
    assert {measure.key for measure in report.measures} == keys
    assert len(report.values(own_key(3), AHEAD)) == 2
    for key in keys:
        values = report.values(key, OURS)
        assert len(values) == 2 and all(value > 0 for value in values)
    assert "own time of a step, 3 rows" in capsys.readouterr().out


def report_of(values: dict[str, float]) -> Report:
    samples = [Sample(measure=k, system=OURS, repeat=0, value=v) for k, v in values.items()]
    return Report(
        name="step", started="", context={}, systems={}, measures=(), samples=tuple(samples)
    )


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ({own_key(1): 158, own_key(10): 230}, [True, True]),
        ({own_key(1): 159, own_key(10): 230}, [False, True]),
        ({own_key(1): 100, own_key(10): 321}, [False, False]),
        ({own_key(1): 100, own_key(10): 100, SHARE.key: 4.0}, [True, True, True]),
        ({own_key(1): 100, own_key(10): 100, SHARE.key: 4.1}, [True, True, False]),
    ],
)
def test_goals_are_held_against_the_medians(values, met):
    assert [goal.met for goal in goals(report_of(values), (1, 10))] == met


@pytest.mark.parametrize("ahead", [False, True])
def test_the_idle_model_runs_its_requests_to_their_end(ahead):
    loop = idle_loop(3, 200, ahead=ahead)
    for rid in "abc":
        loop.start(rid, IdleRequest(5))
    while loop.busy:
        loop.tick()
    loop.close()
    assert (loop.num_steps, loop.num_push_backs) == (5, 0)


def test_rows_that_are_no_numbers_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="--rows"):
        step(rows="1,x", output=tmp_path)
