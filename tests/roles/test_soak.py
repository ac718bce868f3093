"""A minute of roles under load, with start and end; `scripts/soak.sh` is the same for an hour."""

from __future__ import annotations

import asyncio

import pytest

from phalanx.testing.soak.run import Soak, growth, report

GROWTH_MIB = 24.0


@pytest.mark.long
def test_200_streams_end_once_while_engines_die_drain_scale_sleep_and_are_updated(tmp_path):
    said = []
    soak = Soak(tmp_path, 200, 40.0, said.append)
    asyncio.run(soak.run())
    told = report(soak, tmp_path / "report") + "\n" + "\n".join(said)
    assert soak.faults == [], told
    assert soak.num_updates > 10
    assert soak.tally.num_answered > 200
    assert soak.tally.num_lost <= 2 * 200, told
    assert (tmp_path / "report" / "memory.png").is_file()
    for kind in ("control", "gateway"):
        assert growth(soak, kind) < GROWTH_MIB, told
