"""A peer that is gone without a word is found out; one that answers, or need not be there, is not."""

from __future__ import annotations

import asyncio

from phalanx.gateway.http2.keepalive import Keepalive
from tests.gateway.policy_servers import run


class Watched:
    def __init__(self, wanted: bool = True, answers: int = 0) -> None:
        self.pings = 0
        self.answers = answers
        self.pinged, self.lost = asyncio.Event(), asyncio.Event()
        self.keepalive = Keepalive(
            0.01, 0.01, wanted=lambda: wanted, ping=self._ping, lost=self.lost.set
        )

    def _ping(self) -> None:
        self.pings += 1
        self.pinged.set()
        if self.pings <= self.answers:
            self.keepalive.heard()


def test_a_peer_that_does_not_answer_is_lost():
    async def scenario():
        watched = Watched(answers=3)
        await watched.lost.wait()
        assert watched.pings == 4

    run(scenario())


def test_nobody_is_asked_who_need_not_be_there():
    async def scenario():
        watched, other = Watched(wanted=False), Watched(answers=5)
        await other.lost.wait()
        assert not watched.pings and not watched.lost.is_set()
        watched.keepalive.close()

    run(scenario())


def test_after_its_end_nothing_is_asked():
    async def scenario():
        closed, other = Watched(), Watched(answers=5)
        closed.keepalive.close()
        await other.lost.wait()
        assert not closed.pings

    run(scenario())
