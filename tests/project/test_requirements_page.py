"""`docs/requirements.md` is what `scripts/requirements.py` makes of the tests' names."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    script = runpy.run_path(str(ROOT / "scripts" / "requirements.py"))
    found = script["numbered_tests"]()
    assert found
    current = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
    assert current == script["page"](found), "run: python scripts/requirements.py"
