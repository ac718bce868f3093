"""Supervisors over stand-ins that import no torch, closed after each test."""

from __future__ import annotations

import pytest

from tests.engine.workers.supervised import Gate, Pipe, Recorder, supervise


@pytest.fixture
def pipe(tmp_path):
    """Makes named pipes for workers to announce themselves on."""
    pipes = []

    def pipe(name="announce"):
        pipes.append(Pipe(tmp_path / name))
        return pipes[-1]

    yield pipe
    for each in pipes:
        each.close()


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


@pytest.fixture
def listener():
    return Recorder()


@pytest.fixture
def build(listener):
    """Builds supervisors that tell `listener`, and closes them at the end."""
    built = []

    def build(*misdeeds, **options):
        built.append(supervise(misdeeds, **{"listener": listener, **options}))
        return built[-1]

    yield build
    for each in built:
        each.close()


@pytest.fixture
def started(build):
    """Builds and starts."""

    def started(*misdeeds, **options):
        supervisor = build(*misdeeds, **options)
        supervisor.start()
        return supervisor

    return started
