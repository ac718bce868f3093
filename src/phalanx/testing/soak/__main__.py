"""`python -m phalanx.testing.soak --minutes 60`: the whole of it, with a report and a plot.

Ends with 1 where something that was promised did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from phalanx.testing.soak.job import SoakError
from phalanx.testing.soak.run import Soak, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m phalanx.testing.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long, at least two rounds")
    parser.add_argument("--callers", type=int, default=200, help="streams at once")
    parser.add_argument("--output", type=Path, default=Path("soak-results"))
    given = parser.parse_args()
    if not given.minutes > 0 or given.callers < 1:
        parser.error("--minutes must be above 0 and --callers at least 1")
    with tempfile.TemporaryDirectory(prefix="phalanx-soak-") as directory:
        soak = Soak(Path(directory), given.callers, given.minutes * 60.0, note=_note)
        try:
            asyncio.run(soak.run())
        except SoakError as error:
            soak.faults.append(str(error))
        except KeyboardInterrupt:
            _note("interrupted")
            return 130
    _note(report(soak, given.output))
    return 1 if soak.faults else 0


def _note(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
