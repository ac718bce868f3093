"""Every example runs: the plugin from its own wheel, the configurations, the demo."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.schema.serve_config import parse_serve_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "examples").rglob("*.yaml"))
JOBS = [path for path in CONFIGS if "\nroles:" in path.read_text(encoding="utf-8")]
SERVERS = [path for path in CONFIGS if path not in JOBS]
REACH = "examples/plugin_reach/serve.yaml"


def infer(url: str, body: object) -> tuple[int, dict]:
    request = urllib.request.Request(
        f"{url}/infer", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_a_shipped_job_is_valid(path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["up", str(path), "--check"])
    assert ended.value.code in (0, None)
    assert "/rollout" in capsys.readouterr().out


@pytest.mark.parametrize("path", SERVERS, ids=lambda path: path.name)
def test_a_shipped_configuration_is_valid(path, plugins_installed, monkeypatch, capsys):
    parse_serve_config(path.read_text(encoding="utf-8"), str(path))
    monkeypatch.syspath_prepend(plugins_installed)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(path), "--check"])
    assert ended.value.code in (0, None)
    assert f"port: {path.read_text().partition('port: ')[2].split()[0]}" in capsys.readouterr().out


def test_a_plugin_of_another_package_is_served(serve):
    url = serve(REACH)
    status, answer = infer(url, {"position": [0.0, 1.0], "target": [0.1, -1.0]})
    assert status == 200
    assert answer["action"] == pytest.approx([0.05, -0.25])
    assert answer["error"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"position": [0.0], "target": [0.0, 1.0]}, "target has 2 joints and position 1"),
        ({"position": [0.0]}, "target"),
        ({"position": ["x"], "target": [0.0]}, "position"),
    ],
)
def test_what_the_plugin_refuses_is_a_400(serve, body, named):
    status, answer = infer(serve(REACH), body)
    assert status == 400
    assert named in json.dumps(answer)


def test_the_plugin_is_about_sixty_lines():
    plugin = ROOT / "examples" / "plugin_reach" / "src" / "phalanx_reach.py"
    assert len(plugin.read_text(encoding="utf-8").splitlines()) <= 65


@pytest.mark.long
def test_the_demo_runs():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert done.stdout.count("tokens/s]") == 3
    assert "output logprobs: " in done.stdout
    log = Path(done.stdout.rpartition("Its log: ")[2].strip())
    assert log.read_text(encoding="utf-8")


@pytest.mark.long
def test_complaint_primerl_2627_complaint_verl_1459_one_command_starts_judge_and_teacher_too():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "roles_demo.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "default is down" not in done.stdout
    assert "demo is down" in done.stdout
