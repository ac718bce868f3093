from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from phalanx import DeploymentConfig, Engine, EngineArgs, log
from phalanx.testing import CountingArgs

from .conftest import cpu_config


@pytest.fixture(autouse=True)
def restored():
    root = logging.getLogger("phalanx")
    before = (list(root.handlers), root.level, root.propagate)
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in before[0]:
        root.addHandler(handler)
    root.setLevel(before[1])
    root.propagate = before[2]


def test_lines_on_stderr_carry_the_request_id(capsys):
    log.configure("INFO")
    logger = logging.getLogger("phalanx.some.part")
    with log.request_context("r-1"):
        logger.info("in context")
    logger.info("by hand", extra={"rid": "r-2"})
    logger.info("without")
    logger.debug("below the level")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("INFO    phalanx.some.part [r-1] in context")
    assert second.endswith("[r-2] by hand")
    assert third.endswith("phalanx.some.part without")


def test_lines_go_to_what_is_stderr_by_then(monkeypatch):
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    log.configure("INFO")
    monkeypatch.setattr(sys, "stderr", second)
    first.close()  # as at the end of a test whose output is captured
    logging.getLogger("phalanx.part").info("later")
    assert second.getvalue().endswith("INFO    phalanx.part later\n")
    assert log.configured() == log.LogSetup("INFO", json=False, file=None)


def test_json_lines_in_a_file(tmp_path):
    file = tmp_path / "logs" / "engine.log"
    log.configure("DEBUG", json=True, file=file)
    logger = logging.getLogger("phalanx.part")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it is %s", "bad", extra={"rid": "r-3"})
    logger.debug("plain")
    bad, plain = [json.loads(line) for line in file.read_text().splitlines()]
    assert (bad["level"], bad["message"], bad["rid"]) == ("ERROR", "it is bad", "r-3")
    assert bad["exception"].endswith("ValueError: broken")
    assert set(plain) == {"time", "level", "logger", "message"}


def test_a_later_call_replaces_an_earlier_one(capsys, tmp_path):
    log.configure("INFO", file=tmp_path / "a.log")
    log.configure("WARNING")
    logger = logging.getLogger("phalanx")
    logger.info("dropped")
    logger.warning("kept")
    assert (tmp_path / "a.log").read_text() == ""
    assert capsys.readouterr().err.endswith("phalanx kept\n")
    assert len(logger.handlers) == 1


@pytest.mark.long
def test_a_worker_logs_where_its_parent_does(tmp_path):
    file = tmp_path / "all.log"
    log.configure("INFO", file=file)
    try:
        engine = Engine(
            EngineArgs("counting", CountingArgs(), cpu_config()),
            deployment=DeploymentConfig.local(replica_count=2),
        )
        engine.close()
    finally:
        log.configure("WARNING")
    ready = [line for line in file.read_text().splitlines() if "Engine ready" in line]
    assert sorted(line.split("<")[1].split(">")[0] for line in ready) == [
        "replica 0 rank 0",
        "replica 1 rank 0",
    ]
