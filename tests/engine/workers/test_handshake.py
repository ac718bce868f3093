"""What a worker may say, and when."""

from __future__ import annotations

import pytest

from phalanx.engine.workers.messages import (
    Answer,
    Crashed,
    Events,
    Finished,
    Hello,
    PayloadRef,
    Place,
    Ready,
    Stopped,
)
from phalanx.engine.workers.worker import Handshake, Stage, UnexpectedReplyError, describe_status
from phalanx.schema.limits import Limits
from phalanx.schema.placement import WorkerPlacement

PLACEMENT = WorkerPlacement(5, 2, 1, 0, 5, {}, True)
HELLO = Hello(5, 2, 1, 77)
READY = Ready(5, Limits(), {})
OTHERS = [
    Events(PayloadRef(Place.PACKET, (0,))),
    Finished(1),
    Answer(1, True),
    Crashed("loading", "x", "y"),
    Stopped(),
]


def handshake(*taken):
    handshake = Handshake(PLACEMENT, 77)
    for reply in taken:
        handshake.take(reply)
    return handshake


def test_a_worker_says_hello_and_then_that_it_is_ready():
    assert handshake().stage is Stage.NEW
    assert handshake(HELLO).stage is Stage.HELLO
    done = handshake(HELLO, READY)
    assert done.stage is Stage.READY and done.ready is READY


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        (Hello(4, 2, 1, 77), "worker_id=4 instead of 5"),
        (Hello(5, 1, 1, 77), "replica_id=1 instead of 2"),
        (Hello(5, 2, 0, 77), "replica_rank=0 instead of 1"),
        (Hello(5, 2, 1, 78), "pid=78 instead of 77"),
    ],
)
def test_a_worker_that_says_it_is_another_is_refused(hello, text):
    with pytest.raises(UnexpectedReplyError, match=text):
        handshake(hello)


@pytest.mark.parametrize(
    ("taken", "reply", "text"),
    [
        ((), READY, "it sent Ready while beginning, where Hello was expected"),
        ((HELLO,), HELLO, "it sent Hello while loading, where Ready was expected"),
        ((HELLO,), Ready(4, Limits(), {}), "worker_id=4 instead of 5"),
        ((HELLO, READY), READY, "it sent Ready while serving, where nothing was expected"),
        ((HELLO, READY), HELLO, "it sent Hello while serving"),
        *(((), other, "where Hello was expected") for other in OTHERS),
        *(((HELLO,), other, "where Ready was expected") for other in OTHERS),
    ],
)
def test_a_message_out_of_turn_is_refused(taken, reply, text):
    begun = handshake(*taken)
    stage = begun.stage
    with pytest.raises(UnexpectedReplyError, match=text):
        begun.take(reply)
    assert begun.stage is stage


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "was killed by SIGKILL (a machine out of memory does that too)"),
        (-15, "was killed by SIGTERM"),
        (-77, "was killed by signal 77"),
    ],
)
def test_an_exit_status_in_words(status, text):
    assert describe_status(status) == text
