"""A callback at each denoise step, instead of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from phalanx.models.cosmos3.progress import generate
from phalanx.models.cosmos3.request import Cosmos3Video
from phalanx.schema.videos import DenoiseProgress
from tests.models.cosmos3.requests import video_request

VIDEO = Cosmos3Video(torch.zeros(1, 3, 1, 2, 2))
STEPS = [DenoiseProgress(1, 2, 999), DenoiseProgress(2, 2, 500)]


class Streams:
    """An engine that streams what it was given."""

    def __init__(self) -> None:
        self.closed = 0

    @contextmanager
    def stream(self, request: object, *, rid: str | None = None) -> Iterator[Iterator[object]]:
        try:
            yield iter([*STEPS, VIDEO])
        finally:
            self.closed += 1


def test_each_step_is_told_and_the_answer_returned():
    engine, told = Streams(), []
    assert generate(engine, video_request(), told.append) is VIDEO
    assert told == STEPS
    assert engine.closed == 1


def test_a_callback_that_fails_ends_the_request():
    engine = Streams()

    def stop(progress: DenoiseProgress) -> None:
        raise KeyError(progress.step)

    with pytest.raises(KeyError, match="1"):
        generate(engine, video_request(), stop)
    assert engine.closed == 1


def test_who_reads_late_hears_of_the_last_step():
    assert STEPS[0].merged(STEPS[1]) is STEPS[1]
