from __future__ import annotations

import pytest

from phalanx.plugin import Delta, Final, Scheduled
from phalanx.testing import (
    ConformanceError,
    Counting,
    CountingArgs,
    CountOutput,
    CountRequest,
    check_batching_entry,
)

REQUESTS = [CountRequest(count=n) for n in (4, 6, 0, 1, 9)]


def check(plugin):
    def entry():
        made = plugin()
        made.setup(CountingArgs(max_batch_size=3))
        return made

    check_batching_entry(entry, REQUESTS)


def test_the_published_fake_conforms():
    check(Counting)


def without(kind):
    """Ticks that leave out the events of one kind."""

    class Silent(Counting):
        def tick(self):
            return [event for event in super().tick() if not isinstance(event, kind)]

    return Silent


class Repeating(Counting):
    def tick(self):
        return [again for event in super().tick() for again in (event, event)]


class WrongOutput(Counting):
    def tick(self):
        return [
            Final(event.rid, event.payload.numbers) if isinstance(event, Final) else event
            for event in super().tick()
        ]


class AlwaysBusy(Counting):
    busy = True


class NeverBusy(Counting):
    busy = False


class Uncancellable(Counting):
    def cancel(self, rid):
        pass


class StrictCancel(Counting):
    def cancel(self, rid):
        self._state.running[rid]
        super().cancel(rid)


class Talkative(Counting):
    def tick(self):
        return [*super().tick(), Scheduled("nobody")]


class FlushesAlways(Counting):
    def control(self, op):
        return bool(super().control(op)) or True


class KeepsPages(Counting):
    def statistics(self):
        return type(super().statistics())(pool_used_tokens=1)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (without(Scheduled), "had a delta before Scheduled"),
        (without(Final), "is False although .* have not ended"),
        (Repeating, "was reported scheduled twice"),
        (WrongOutput, "ended in a tuple instead of a CountOutput"),
        (AlwaysBusy, "busy is True although no request is live"),
        (NeverBusy, "busy is False although 'alone 0' was just started"),
        (Uncancellable, "ended with cancelled=False"),
        (Talkative, "not live"),
        (FlushesAlways, "flush was applied while requests are live"),
        (KeepsPages, "no request is live, and yet"),
    ],
)
def test_what_breaks_the_contract_is_found(plugin, message):
    with pytest.raises(ConformanceError, match=message):
        check(plugin)


def test_a_plugins_own_exception_comes_through():
    with pytest.raises(KeyError):
        check(StrictCancel)


def test_a_delta_after_the_end_is_found():
    class Late(Counting):
        def tick(self):
            events = super().tick()
            ends = [event.rid for event in events if isinstance(event, Final)]
            return [*events, *(Delta(rid, CountOutput(())) for rid in ends)]

    with pytest.raises(ConformanceError, match="not live"):
        check(Late)
