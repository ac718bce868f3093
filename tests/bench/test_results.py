"""Medians, ratios, and the files that a report becomes."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from phalanx.bench.report_files import print_table, write_report
from phalanx.bench.results import Measure, Report, Sample, percentile

SPEED = Measure(key="speed", label="output", unit="tokens/s")
DELAY = Measure(key="delay", label="first token", unit="ms", more_is_better=False)


def report() -> Report:
    values = {
        ("speed", "ours"): [100.0, 50.0, 120.0],
        ("speed", "theirs"): [50.0, 50.0, 40.0],
        ("delay", "ours"): [10.0],
        ("delay", "theirs"): [30.0],
        ("speed", "third"): [7.0],
    }
    samples = tuple(
        Sample(measure=measure, system=system, repeat=repeat, value=value)
        for (measure, system), series in values.items()
        for repeat, value in enumerate(series)
    )
    return Report(
        name="generate",
        started="2030-01-01 00:00 UTC",
        context={"machine": "2 x Test CPU"},
        systems={"ours": "ours 1.0", "theirs": "theirs 2.0", "third": "third 3.0"},
        measures=(SPEED, DELAY),
        samples=samples,
    )


def test_median_and_spread():
    summary = report().summary("speed", "ours")
    assert summary is not None
    assert (summary.median, summary.low, summary.high, summary.count) == (100.0, 50.0, 120.0, 3)
    assert report().summary("delay", "third") is None


def test_ratio_compares_within_each_round_and_above_one_is_better():
    # Rounds give 2, 1 and 3; the ratio of the medians would also be 2, of the means 1.93.
    assert report().ratio(SPEED, "ours", "theirs") == 2.0
    assert report().ratio(DELAY, "ours", "theirs") == 3.0
    assert report().ratio(DELAY, "ours", "third") is None


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 3.0), (0.99, 5.0), (1.0, 5.0)])
def test_percentile(share, expected):
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], share) == expected


def test_files_hold_the_table_the_plot_and_every_value(tmp_path):
    write_report(report(), tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| output [tokens/s] | 100 (50 to 120) | 50 (40 to 50) | 7 | 2.00 |" in text
    assert "| first token [ms] | 10 | 30 | - | 3.00 | - |" in text
    assert "2 x Test CPU" in text and "theirs 2.0" in text
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes(), type=Report) == (
        report()
    )


def test_table_for_the_terminal(capsys):
    print_table(report(), Console(width=160))
    assert "first token [ms]" in capsys.readouterr().out
