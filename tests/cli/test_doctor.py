"""`phalanx env` and `phalanx doctor`."""

from __future__ import annotations

import json
import platform
import socket
import sys
from pathlib import Path

import pytest

from phalanx import __version__
from phalanx.cli import doctor as doctor_module
from phalanx.device_ledger import MIB, DeviceLedger
from phalanx.schema.server_config import POLICY_PORT
from tests.cli.interpreter import write_interpreter


def test_env_tells_versions_plugins_and_variables(run, monkeypatch):
    monkeypatch.setenv("PHALANX_SEED", "7")
    code, out, _ = run("env", "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["phalanx"], facts["python"]) == (__version__, platform.python_version())
    assert "causal_lm" in facts["plugins"]
    assert facts["variables"] == {"PHALANX_DEVICE": "cpu", "PHALANX_SEED": "7"}
    assert facts["packages"]["numpy"]
    assert "pytest" not in facts["packages"]


def test_env_is_lines_without_json(run):
    code, out, _ = run("env")
    assert code == 0
    assert f"phalanx: {__version__}\n" in out
    assert "\n  numpy: " in out


def test_simulated_devices_are_told_of(run, monkeypatch, tmp_path):
    ledger = DeviceLedger.create(tmp_path / "devices", 2, 100 * MIB)
    monkeypatch.setenv("PHALANX_SIMULATED_DEVICES", f"{ledger.path}:1")
    ledger.take(1, "teacher", "weights", 40 * MIB)
    _, out, _ = run("env", "--json")
    assert json.loads(out)["simulated_devices"] == [f"1 of {ledger.path}, 100 MiB"]
    code, out, _ = run("doctor")
    told = f"1 (40 of 100 MiB held) of {ledger.path}, by PHALANX_SIMULATED_DEVICES"
    assert code == 0 and f"note  simulated devices: {told}\n" in out
    ledger.path.unlink()
    code, out, _ = run("doctor")
    assert code == 1 and "fault simulated devices: cannot read the ledger" in out


def test_doctor_finds_nothing_at_fault_here(run):
    code, out, _ = run("doctor")
    assert code == 0
    lines = out.splitlines()
    assert "ok    extra serve: " in out
    assert {line.split()[0] for line in lines} <= {"ok", "note"}


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("PHALANX_SEED", "x", "fault environment: environment variable PHALANX_SEED='x'"),
        ("PHALANX_TP_SIZE", "2", "unset PHALANX_TP_SIZE"),
        ("PHALANX_CACHE_DIR", "/proc/none", "fault cache: /proc/none cannot be written"),
    ],
)
def test_doctor_says_what_is_at_fault_and_exits_with_1(run, monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    code, out, _ = run("doctor")
    assert code == 1
    assert words in out


def test_doctor_notes_a_port_in_use(run):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", POLICY_PORT))
            taken.listen()
        except OSError:
            pass  # in use already
        code, out, _ = run("doctor")
    assert code == 0
    assert f"note  port {POLICY_PORT}: Address already in use; robot policies need --port" in out


def test_doctor_says_which_packages_are_absent(run, monkeypatch):
    def without_pillow() -> dict[str, list[tuple[str, str | None]]]:
        return {"": [("torch", "2.9")], "serve": [("grpcio", "1.66"), ("pillow", None)]}

    monkeypatch.setattr(doctor_module, "extras", without_pillow)
    code, out, _ = run("doctor")
    assert code == 0
    assert "note  extra serve: pillow not installed; run pip install 'phalanx[serve]'" in out


def test_doctor_checks_a_file(run, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("plugin: causal_lm\nplugin_args: {checkpoint_dir: smollm2-135m}\n")
    code, out, _ = run("doctor", str(file))
    assert (code, out.splitlines()[-1]) == (0, f"ok    {file}: serves causal_lm")
    file.write_text("plugin: nosuch\n")
    code, out, _ = run("doctor", str(file))
    assert code == 1
    assert f"fault {file}: plugin 'nosuch' is not known" in out


def test_a_jobs_file_is_checked_too(run):
    file = Path(__file__).parents[2] / "examples" / "roles.yaml"
    code, out, _ = run("doctor", str(file))
    assert out.splitlines()[-1] == f"ok    {file}: runs the roles rollout, genrm, teacher"


def test_the_packages_of_others_that_a_job_starts_are_looked_for(run, tmp_path):
    write_interpreter(tmp_path / "python")
    file = tmp_path / "roles.yaml"
    job = """
launcher: {%s}
roles: {rollout: {models: {a: {engine: external, urls: ["http://127.0.0.1:1"]%s}}}}
"""
    routed = ", route_mode: sglang_router"
    file.write_text(job % ("router_python: ./python", routed))
    code, out, _ = run("doctor", str(file))
    assert f"ok    sglang-router: 0.3.2, in {tmp_path / 'python'}" in out
    file.write_text(job % ("", routed))
    code, out, _ = run("doctor", str(file))
    assert code == 1
    assert f"fault {file}: {file}: route_mode: sglang_router needs sglang-router, which" in out
    file.write_text(job % (f"sglang_python: {sys.executable}", ""))
    code, out, _ = run("doctor", str(file))
    assert (
        f"note  SGLang: not in {sys.executable} (launcher.sglang_python); the job does not" in out
    )


def test_what_is_wrong_with_a_jobs_file_is_a_fault(run, tmp_path):
    file = tmp_path / "roles.yaml"
    file.write_text("roles: {rollout: {models: {a: {modle: x}}}}")
    code, out, _ = run("doctor", str(file))
    assert code == 1
    assert "did you mean roles.rollout.models.a.model?" in out.splitlines()[-1]
