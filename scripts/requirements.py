"""Writes `docs/requirements.md`: which test stands for which numbered requirement.

A test names the numbers that it proves at the head of its own name: `test_r50_s11_a_closed_...`, or
for the step engine `test_rule_2_17_3_...`, `test_item_8_5_12_...`, `test_defect_8_6_1_...`, for roles
`test_i43_...` (items), `test_d7_...` (decisions) and `test_complaint_sglang_24119_...`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "requirements.md"
NUMBER = (
    r"(?:(?:rule_2_17|item_8_5|defect_8_6|complaint_[a-z]+)_\d+|[deirs]\d+(?![a-z0-9])|item\d+)"
)
HEAD = """# Requirements and their tests

Numbers are those of the requirement lists that Phalanx is built to. Each names the tests that fail
if the requirement is broken. `python scripts/requirements.py` writes this page from the tests'
names; a test checks that it is up to date.

| number | test |
|---|---|
"""


def numbered_tests() -> dict[str, list[str]]:
    """Requirement numbers, in order, each with its tests as `path::name`."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(rf"def test_{NUMBER}", text):
            continue  # reading every test takes long
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            head = re.match(rf"test((?:_{NUMBER})+)", node.name)
            for number in re.findall(NUMBER, head[1]) if head else ():
                found[number].append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return dict(sorted(found.items(), key=lambda entry: _order(entry[0])))


def page(found: dict[str, list[str]]) -> str:
    """The whole text of the page."""
    rows = [
        f"| {_shown(number)} | " + "<br>".join(f"`{test}`" for test in tests) + " |\n"
        for number, tests in found.items()
    ]
    return HEAD + "".join(rows)


def _shown(number: str) -> str:
    kind, _, places = number.partition("_")
    if kind == "complaint":
        return places.replace("_", " #")
    if re.fullmatch(r"[di]\d+", number):
        return f"D-{number[1:]}" if number[0] == "d" else f"role item {number[1:]}"
    if places:
        return f"{kind} {places.replace('_', '.')}"
    return number.upper().replace("ITEM", "item ")


def _order(number: str) -> tuple[str, int]:
    letters = number.rstrip("0123456789")
    return letters, int(number[len(letters) :])


if __name__ == "__main__":
    PAGE.write_text(page(numbered_tests()), encoding="utf-8")
