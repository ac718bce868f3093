"""The check of resources passes one that keeps its contract, and names the rule that another breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.step.outcomes import ADMITTED, AdmitOutcome, AdmitRuntimeError
from phalanx.testing import ConformanceError, check_resource
from tests.testing.tally import CASE, Tally


def test_a_resource_that_keeps_its_contract_passes():
    check_resource(Tally, CASE)


def test_one_without_bounds_passes():
    check_resource(lambda: Tally(places=1000), CASE)


BROKEN: dict[str, tuple[type[Tally], str]] = {}


def broken(message: str):
    def note(cls):
        BROKEN[cls.__name__] = cls, message
        return cls

    return note


@broken("at rest: 'tally' is not, although no request was there yet")
class NeverRests(Tally):
    def at_rest(self):
        return False


@broken("at rest: 'tally' is not, after all requests were removed")
class KeepsAnEntry(Tally):
    def remove_request(self, rid):
        super().remove_request(rid)
        self.streams.setdefault("kept", {})


@broken("batching: 'b' differs from alone")
class MixesRows(Tally):
    def count(self, rids):
        for place, stream in enumerate(self.current):
            stream.numbers.append(sum(map(ord, rids[0])) * 100 + place)


@broken("ingest is idempotent: a second one changed state")
class ForgetsOnIngest(Tally):
    def ingest_request(self, rid, config):
        self.remove_request(rid)
        self.streams[rid] = {}


@broken("remove tolerates unknown ids")
class RemoveNeedsKnownIds(Tally):
    def remove_request(self, rid):
        for stream in self.streams.pop(rid).values():
            self.give_back(stream)


@broken("remove frees all|at rest")
class RemoveLeaks(Tally):
    def remove_request(self, rid):
        self.streams.pop(rid, None)


@broken("unadmit leaves no trace: a step given up after it was admitted")
class UnadmitDoesNothing(Tally):
    def unadmit(self, step, ctx):
        ctx.reservations.pop(self.key, None)


@broken("unadmit leaves no trace: the context still holds a reservation")
class UnadmitKeepsItsReservation(Tally):
    def unadmit(self, step, ctx):
        taken = ctx.reservations.get(self.key)
        super().unadmit(step, ctx)
        if taken is not None:
            ctx.reservations[self.key] = ((), ())


@broken("unadmit leaves no trace: a step given up after it was begun")
class BeginCommits(Tally):
    def begin(self, step, ctx):
        super().begin(step, ctx)
        for stream in self.current:
            stream.length = len(stream.numbers)
            stream.numbers.append(-1)
            stream.length += 1


@broken("unadmit leaves no trace: a step given up after its forward")
class ForwardCommits(Tally):
    def count(self, rids):
        super().count(rids)
        for stream in self.current:
            stream.length = len(stream.numbers)

    def commit(self, step, ctx):
        for stream in ctx.reservations.pop(self.key, ((), ()))[0]:
            stream.in_flight = False


@broken("at rest: .tally. is not, after (all requests were|a request was) removed")
class UnadmitGivesWhatItNeverTook(Tally):
    def unadmit(self, step, ctx):
        if self.key not in ctx.reservations and self.free < self.places:
            self.free += 1
        super().unadmit(step, ctx)


@broken("commit: an unadmit behind it undid the step")
class CommitKeepsItsReservation(Tally):
    def commit(self, step, ctx):
        taken = ctx.reservations[self.key]
        super().commit(step, ctx)
        ctx.reservations[self.key] = taken


@broken("removed in its step|removal in a step")
class FreesTwiceWhatWasRemoved(Tally):
    def unadmit(self, step, ctx):
        touched, invented = ctx.reservations.pop(self.key, ((), ()))
        for stream in touched:
            stream.in_flight = False
            del stream.numbers[stream.length :]
        for rid, label in invented:
            self.streams.get(rid, {}).pop(label, None)
            self.free += 1


@broken("admit again: a step that was admitted twice|after a step was admitted twice")
class ReservesTwice(Tally):
    def admit(self, step, ctx):
        earlier = ctx.reservations.pop(self.key, None)
        outcome = super().admit(step, ctx)
        return outcome if earlier is None else ADMITTED


@broken("return in a step|came back while a step ran")
class MistakesAReturnForTheFormerLife(Tally):
    def unadmit(self, step, ctx):
        touched, invented = ctx.reservations.pop(self.key, ((), ()))
        for stream in touched:
            stream.in_flight = False
            del stream.numbers[stream.length :]
        for rid, label in invented:
            stream = self.streams.get(rid, {}).pop(label, None)
            if stream is not None:
                self.give_back(stream)


@broken("exhaustion: admit of .* raised .*IndexError")
class RaisesWhenFull(Tally):
    def refusal(self, step):
        if super().refusal(step) is not None:
            raise IndexError("pop from empty list")


@broken("exhaustion: admit refused without a reason")
class RefusesWithoutReason(Tally):
    def admit(self, step, ctx):
        outcome = super().admit(step, ctx)
        return outcome if outcome.ok else AdmitOutcome(ok=False)


@broken("exhaustion: the refusal is AdmitRuntimeError")
class RefusesForGood(Tally):
    def refusal(self, step):
        refused = super().refusal(step)
        return None if refused is None else AdmitRuntimeError("no place")


@broken("says that nothing is missing")
class SaysNothingIsMissing(Tally):
    def refusal(self, step):
        refused = super().refusal(step)
        return refused and replace(refused, pages_short=0)


@broken("refused admit|removal in a step|at rest")
class TakesBeforeItRefuses(Tally):
    def admit(self, step, ctx):
        outcome = super().admit(step, ctx)
        if not outcome.ok:
            for stream in (self.streams[rid].get("main") for rid in step.rids):
                if stream is not None:
                    stream.length = 0
        return outcome


@broken("refused admit: it left a reservation")
class LeavesAReservation(Tally):
    def unadmit(self, step, ctx):
        if ctx.reservations.get(self.key) != "refused":
            super().unadmit(step, ctx)

    def admit(self, step, ctx):
        outcome = super().admit(step, ctx)
        if not outcome.ok:
            ctx.reservations[self.key] = "refused"
        return outcome


@broken("plan does not disturb a begun step")
class PlansIntoTheRunningStep(Tally):
    def plan(self, step, ctx):
        self.current = super().plan(step, ctx)
        return self.current

    def begin(self, step, ctx):
        running = self.current
        super().begin(step, ctx)
        self.current = running


@broken("forks are undone: a step given up left a fork")
class ForksStay(Tally):
    def unadmit(self, step, ctx):
        touched, invented = ctx.reservations.get(self.key, ((), ()))
        kept = [key for key in invented if key[1] != "branch"]
        if self.key in ctx.reservations:
            ctx.reservations[self.key] = touched, kept
        super().unadmit(step, ctx)


@broken("release: a step was admitted without its memory")
class AdmitsWhenReleased(Tally):
    def release(self, tags):
        pass


@broken("was refused with room")
class ReleasesWhateverTheTag(Tally):
    def release(self, tags):
        self.released = True


@broken("restore: there is less room than before")
class RestoresTooLittle(Tally):
    def restore(self, tags):
        super().restore(tags)
        self.places = self.free = 5


@broken("eviction: nothing of 'a' is reclaimable after a step")
class OffersNothing(Tally):
    def reclaimable(self, rid):
        return 0


@broken("eviction: offload freed 0 of the 1 that were reclaimable")
class MovesNothing(Tally):
    def offload(self, rid):
        return 0


@broken("eviction: is_offloaded is False after an offload")
class DoesNotSayThatItIsAway(Tally):
    def is_offloaded(self, rid):
        return False


@broken("eviction: an offload made no room for others")
class MovesAndKeepsThePlace(Tally):
    def move(self, stream, *, away):
        super().move(stream, away=away)
        self.free += -1 if away else 1


@broken("a step of an offloaded request was answered None")
class StepsOnWhatIsAway(Tally):
    def refusal(self, step):
        short = sum("main" not in self.streams[rid] for rid in step.rids) - self.free
        return super().refusal(step) if short > 0 else None


@broken("eviction: a reload brought back something else")
class LosesContents(Tally):
    def move(self, stream, *, away):
        super().move(stream, away=away)
        stream.numbers = [0] * len(stream.numbers)


@broken("eviction: a request was moved while a step ran")
class MovesUnderAStep(Tally):
    def offload(self, rid):
        for stream in self.streams.get(rid, {}).values():
            stream.in_flight = False
        return super().offload(rid)


@broken("eviction: a reload succeeded without room")
class ReloadsWithoutRoom(Tally):
    def reload(self, rid):
        for stream in self.streams.get(rid, {}).values():
            if stream.away:
                self.move(stream, away=False)
        return True


@broken("after an offloaded request was removed")
class ForgetsTheHostPlace(Tally):
    def give_back(self, stream):
        if not stream.away:
            self.free += 1


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name):
    cls, message = BROKEN[name]
    with pytest.raises(ConformanceError, match=message):
        check_resource(cls, CASE)


def test_a_case_that_cannot_be_repeated_is_said_to_be_so():
    numbers = iter(range(10**6))
    case = replace(CASE, read=lambda resources, rid: next(numbers))
    with pytest.raises(ConformanceError, match="case: two new resources differ"):
        check_resource(Tally, case)


def test_a_resource_with_too_little_room_to_be_checked_is_said_to_be_so():
    with pytest.raises(ConformanceError, match="room for four requests"):
        check_resource(lambda: Tally(places=3), CASE)


def test_a_resource_that_does_not_plan_ahead_need_not_bear_it():
    class Late(PlansIntoTheRunningStep):
        plans_ahead = False

    check_resource(Late, CASE)


def test_dependencies_come_first_and_have_keys_of_their_own():
    with pytest.raises(ConformanceError, match="two of them have one key"):
        check_resource(lambda: (Tally(), Tally()), CASE)
    assert ADMITTED.ok
