"""An invalid placement is refused before anything exists: the interpreter itself counts processes,
ports and files of a real `phalanx up`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
MADE = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system",
        "socket.bind", "socket.connect", "socket.__new__", "os.mkdir", "os.rename", "os.link"}
seen = []

def watch(event, arguments):
    if event in MADE:
        seen.append(event)
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        seen.append(f"open {arguments[0]}")

from phalanx.cli.main import main
from phalanx.cli import up, up_plan, up_run
sys.addaudithook(watch)
found = []
for file in sys.argv[1:]:
    code = 0
    try:
        main(["up", file])
    except SystemExit as ended:
        code = ended.code
    found.append([code, seen[:]])
    seen.clear()
print(json.dumps(found), file=sys.__stdout__)
"""
ROLES = """
gateway: {http_port: 0}
roles:
  rollout: {models: {student: {engine: external, urls: ["http://127.0.0.1:1"]}}}
  genrm: {models: {judge: {model: /no/such, replicas: 2}}}
  teacher: {models: {big: {model: /no/such, ranks: 2}}}
"""
CO_RESIDENT = "{mode: defer, devices_per_node: 3, phases: [{name: p, roles: [genrm, teacher]}]}"


INVALID = {
    CO_RESIDENT: "phase 'p' of placement.phases needs 4 devices at the same time",
    "{mode: split, devices_per_node: 3}": "placement.mode=split needs 4 devices",
    "{mode: split, nodes: 4, devices_per_node: 1}": "ranks=2 is more than a node's 1 devices",
    "{mode: defer, external_groups: [genrm]}": "placement.external_groups has genrm, and",
}


def up(folder: Path, *jobs: str) -> tuple[list[tuple[int, list[str]]], str, list[Path]]:
    """A real `phalanx up` of each: status and what was made, all errors, and what is left."""
    files = []
    for number, text in enumerate(jobs):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(text)
    cache = folder / "cache"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *files],
        env={**os.environ, "PHALANX_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr, list(cache.rglob("*"))


def test_i7_i72_no_process_no_port_and_no_file_before_a_refusal(tmp_path):
    found, errors, left = up(tmp_path, *(f"placement: {given}\n{ROLES}" for given in INVALID))
    assert found == [[2, []]] * len(INVALID)
    for line, says in zip(errors.splitlines(), INVALID.values(), strict=True):
        assert says in line
    assert left == []


@pytest.mark.long
def test_what_a_start_makes_would_have_been_seen(tmp_path):
    """The same count of a job that is placed, and whose one engine nobody can reach."""
    roles = ROLES.partition("  genrm")[0].replace(
        "rollout: {", "rollout: {deployment: {startup_timeout_s: 0.1}, "
    )
    ((code, seen),), _, left = up(
        tmp_path, f"placement: {{mode: split, devices_per_node: 1}}\n{roles}"
    )
    assert code == 1
    assert {"subprocess.Popen", "socket.bind", "os.mkdir"} <= set(seen)
    assert left
