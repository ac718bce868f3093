"""Rules about the source that no linter knows: sizes, and who may name what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "phalanx"
MAX_FILE_LINES = 400
MAX_CLASS_LINES = 250

TOO_LONG: dict[str, str] = {}
"""Files that may be longer, at most five, each with its reason."""

OWNED = {
    "torch.cuda": ("device/",),
    "torch.distributed": ("parallel/",),
    # A benchmark's workers run in the environments of the peers and set those peers' variables.
    "os.environ": ("settings.py", "bench/workers/"),
    "os.getenv": ("settings.py",),
    "time.time": ("clock.py",),
    "time.sleep": (),
}
"""Names that only the files below these paths may use."""


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain, or the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def names_used(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every dotted name and every imported one, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield dotted(node), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def violations(tree: ast.Module, where: str) -> list[str]:
    """Uses of names in `OWNED` by a file at `where`, relative to the package."""
    found = []
    for name, line in names_used(tree):
        for owned, places in OWNED.items():
            inside = where.startswith(places) if places else False
            if (name == owned or name.startswith(owned + ".")) and not inside:
                found.append(f"{where}:{line} names {name}")
    return found


def test_the_rule_finds_what_it_looks_for():
    assert violations(ast.parse("import torch\ntorch.cuda.synchronize()"), "step/a.py")
    assert violations(ast.parse("from torch import cuda"), "step/a.py")
    assert violations(ast.parse("from os import environ"), "engine/a.py")
    assert not violations(ast.parse("import torch\ntorch.cuda.synchronize()"), "device/cuda.py")


@pytest.fixture(scope="module")
def sources() -> dict[str, ast.Module]:
    """Every file of the package as a tree, by where it is in it."""
    return {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in python_files("src")
    }


def test_only_the_owner_names_it(sources):
    assert [found for where, tree in sources.items() for found in violations(tree, where)] == []


def test_files_stay_short():
    long = {
        path.relative_to(ROOT).as_posix(): lines
        for path in python_files("src", "tests", "examples", "scripts")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) >= MAX_FILE_LINES
    }
    assert {name: lines for name, lines in long.items() if name not in TOO_LONG} == {}
    assert set(TOO_LONG) <= set(long), "an exception that is not needed any more"
    assert len(TOO_LONG) <= 5


def test_classes_stay_short(sources):
    long = [
        f"{where}:{node.lineno} {node.name}"
        for where, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_CLASS_LINES
    ]
    assert long == []


def test_modules_open_with_what_they_are(sources):
    silent = [
        where for where, tree in sources.items() if tree.body and ast.get_docstring(tree) is None
    ]
    assert silent == []
