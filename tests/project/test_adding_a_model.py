"""The page on models of several nodes: its blocks are the example package, and they run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.project.markdown import ROOT, blocks
from tests.project.test_examples import infer

PAGE = "adding-a-model.md"
PACKAGE = ROOT / "examples" / "plugin_pointing"
SERVED = "examples/plugin_pointing/serve.yaml"
POINTS = {"points": [[4.0, 0.0], [0.0, 4.0]], "hand": [0.0, 0.0], "tolerance": 0.5}


def shown(language: str, file: str | None = None) -> str:
    """What the page shows of a file, its blocks one after the other."""
    title = language if file is None else f"{language} title={file}"
    found = [block.text for block in blocks(title) if block.page.name == PAGE]
    assert found, f"{PAGE} shows no {title}"
    return "\n".join(found)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_page_is_short():
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 400


@pytest.mark.parametrize(
    ("language", "title", "file"),
    [
        ("python", "phalanx_pointing.py", "src/phalanx_pointing.py"),
        ("toml", "pyproject.toml", "pyproject.toml"),
        ("yaml", None, "serve.yaml"),
    ],
)
def test_the_page_shows_the_whole_package(language, title, file):
    assert lines(shown(language, title)) == lines((PACKAGE / file).read_text(encoding="utf-8"))


def test_every_block_is_run_by_a_test():
    """Those of other kinds are run as on all pages: shell commands, and the configuration."""
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    kinds = set(re.findall(r"^```(\S.*)$", text, re.MULTILINE))
    assert kinds == {
        "python title=phalanx_pointing.py",
        "python title=try_it.py",
        "toml title=pyproject.toml",
        "yaml",
        "sh",
    }


@pytest.mark.long
def test_what_the_page_tries_works(tmp_path):
    (tmp_path / "phalanx_pointing.py").write_text(shown("python", "phalanx_pointing.py"))
    metadata = tmp_path / "phalanx_pointing-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: phalanx-pointing\nVersion: 1.0\n"
    )
    entry = 'pointing = "phalanx_pointing:Pointing"'
    assert entry in shown("toml", "pyproject.toml")
    (metadata / "entry_points.txt").write_text(f"[phalanx.models]\n{entry.replace(chr(34), '')}\n")
    done = subprocess.run(
        [sys.executable, "-c", shown("python", "try_it.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PHALANX_DEVICE": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    path, parts = done.stdout.splitlines()
    assert f"print(engine.step(near).path)  # {path}" in shown("python", "try_it.py")
    assert parts.startswith("[PointingOutput(path=[[0.5, 0.5]")


def test_the_served_model_answers_as_the_page_says(serve):
    status, answer = infer(serve(SERVED), POINTS)
    assert status == 200
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    assert f"`{json.dumps(answer)}`" in text


def test_many_requests_at_once_are_answered_as_alone(serve):
    url = serve(SERVED)
    asked = [{**POINTS, "hand": [float(i), 0.0]} for i in range(8)]
    alone = [infer(url, one) for one in asked]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda one: infer(url, one), asked)) == alone
    assert {status for status, _ in alone} == {200}


def test_what_the_plugin_refuses_names_the_field(serve):
    status, answer = infer(serve(SERVED), {**POINTS, "points": []})
    assert status == 400
    assert "points" in json.dumps(answer)
