"""The order in which a replica's ranks take what other threads left for them.

A rank alone takes what is there. Among several the leader does, and announces it; the others take
exactly that, turn by turn, so that all of them form the same batches and choose the same victims.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from itertools import islice
from queue import SimpleQueue
from typing import Protocol

from phalanx.engine.lockstep.messages import Cancel, Close, Control, Message, Start, Wake
from phalanx.engine.lockstep.rank_links import (
    CancelStep,
    CloseStep,
    ControlStep,
    FollowerLink,
    LeaderLinks,
    StartStep,
    Step,
)
from phalanx.engine.ranks import Rank
from phalanx.engine.requests import LiveRequest, RequestTable
from phalanx.schema.events import Event, Failed, Final

Inbox = SimpleQueue[Message | Wake]
PATIENCE_S = 10.0


class Turns(Protocol):
    """What to do before the next tick, and what must be true before its events go out.

    `patience_s` is how long a rank that is told to close waits for the others to agree before it
    leaves them; None where nobody is to be waited for.
    """

    patience_s: float | None

    def take(self, inbox: Inbox, taken: deque[Message], *, wait: bool) -> None:
        """Append the messages of the next turn to `taken`, `Close` at most as the last.

        Started requests have been claimed. `wait`: there is nothing else to do. Where this raises,
        what it took out of the inbox is in `taken` or `unused`.
        """
        ...

    def settle(self, events: Sequence[Event]) -> None:
        """The turn's tick is done; returns when `events` may be handed out."""
        ...

    def finish(self) -> None:
        """The turn's events were handed out."""
        ...

    def unused(self) -> list[Message]:
        """What was taken out of the inbox and belongs to no turn yet."""
        ...

    def interrupt(self) -> None:
        """From any thread: `take` must not wait for another rank any more."""
        ...

    def close(self) -> None:
        """Let go of the other ranks."""
        ...


class SoloTurns:
    """A replica of one rank."""

    patience_s: float | None = None

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests

    def take(self, inbox: Inbox, taken: deque[Message], *, wait: bool) -> None:
        while wait or not inbox.empty():
            wait = False  # what came may be void; the caller may have something to answer then
            message = inbox.get()
            match message:
                case Start(live=live):
                    if self._requests.claim(live):
                        taken.append(message)
                        if live.cancelled:  # before it came here
                            taken.append(Cancel(live))
                case Cancel(live=live):
                    # Its id may belong to a later request by now.
                    if live.claimed and self._requests.find(live.rid) is live:
                        taken.append(message)
                case Control():
                    taken.append(message)
                case Close():
                    taken.append(message)
                    return
                case Wake():
                    pass

    def settle(self, events: Sequence[Event]) -> None:
        pass

    def finish(self) -> None:
        pass

    def unused(self) -> list[Message]:
        return []

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


class LeaderTurns:
    """The rank that answers: it takes messages as a rank alone does and announces them."""

    def __init__(
        self, requests: RequestTable, links: LeaderLinks, patience_s: float = PATIENCE_S
    ) -> None:
        self.patience_s: float | None = patience_s
        self._solo = SoloTurns(requests)
        self._links = links
        self._turn = 0

    def take(self, inbox: Inbox, taken: deque[Message], *, wait: bool) -> None:
        num_before = len(taken)
        self._solo.take(inbox, taken, wait=wait)
        # The slowest rank has one unfinished turn at most, so that nothing piles up between ranks.
        self._links.await_turn(self._turn - 1)
        self._turn += 1
        steps = [_step(message) for message in islice(taken, num_before, None)]
        self._links.announce(self._turn, steps)

    def settle(self, events: Sequence[Event]) -> None:
        if any(isinstance(event, Final | Failed) for event in events):
            self._links.await_turn(self._turn)

    def finish(self) -> None:
        pass

    def unused(self) -> list[Message]:
        return []

    def interrupt(self) -> None:
        self._links.interrupt()

    def close(self) -> None:
        self._links.close()


class FollowerTurns:
    """Another rank: it takes what the leader announces, and waits for what has yet to come here."""

    def __init__(
        self, requests: RequestTable, link: FollowerLink, patience_s: float = PATIENCE_S
    ) -> None:
        self.patience_s: float | None = patience_s
        self._requests = requests
        self._link = link
        self._turn = 0
        self._arrived: dict[tuple[type[Message], int], Message] = {}
        self._started: weakref.WeakValueDictionary[int, LiveRequest] = weakref.WeakValueDictionary()

    def take(self, inbox: Inbox, taken: deque[Message], *, wait: bool) -> None:
        announced = self._link.next_turn()
        if announced is None:
            taken.append(Close())
            return
        self._turn, steps = announced
        for step in steps:
            match step:
                case StartStep(number=number):
                    message = self._await(Start, number, inbox)
                    if isinstance(message, Start):
                        self._requests.claim(message.live)
                        self._started[number] = message.live
                case CancelStep(number=number):
                    message = Cancel(self._started[number])
                case ControlStep(number=number):
                    message = self._await(Control, number, inbox)
                case CloseStep():
                    message = Close()
            taken.append(message)
            if isinstance(message, Close):
                return

    def settle(self, events: Sequence[Event]) -> None:
        pass

    def finish(self) -> None:
        # Not before the turn's ended requests are forgotten here: their ids may come again at once.
        self._link.acknowledge(self._turn)

    def unused(self) -> list[Message]:
        return list(self._arrived.values())

    def interrupt(self) -> None:
        self._link.interrupt()

    def close(self) -> None:
        self._link.close()

    def _await(self, kind: type[Start] | type[Control], number: int, inbox: Inbox) -> Message:
        """This rank's own copy of an announced message, or `Close` where that comes first."""
        while (kind, number) not in self._arrived:
            message = inbox.get()
            match message:
                case Start(live=live):
                    self._arrived[Start, live.number] = message
                case Control(number=arrived):
                    self._arrived[Control, arrived] = message
                case Close():
                    return message
                case Cancel() | Wake():
                    pass  # the leader's decides
        return self._arrived.pop((kind, number))


def create_turns(rank: Rank, requests: RequestTable) -> Turns:
    """The turns of this rank; connects it with the others of its replica."""
    if rank.place.world == 1:
        return SoloTurns(requests)
    links = rank.listen_or_connect()
    if isinstance(links, LeaderLinks):
        return LeaderTurns(requests, links)
    return FollowerTurns(requests, links)


def _step(message: Message) -> Step:
    match message:
        case Start(live=live):
            return StartStep(live.number)
        case Cancel(live=live):
            return CancelStep(live.number)
        case Control(number=number):
            return ControlStep(number)
        case Close():
            return CloseStep()
