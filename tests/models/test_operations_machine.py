"""Any sequence of operations on a service, against a few lines that say what must come of it.

Whatever is done: every request that was taken ends once, with tokens that the version computes which
is said to have computed them; one that comes while something is missing is refused at once.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phalanx.errors import EngineAsleepError, InvalidRequestError
from phalanx.schema.control import (
    Continue,
    LoadWeights,
    MemoryTag,
    Pause,
    PauseMode,
    ReplaceWeights,
    Sleep,
    Wake,
)
from phalanx.schema.events import Failed, Final
from tests.models.operated import check_spans, drive, oracle, request, save, weights_of

TAGS = st.frozensets(st.sampled_from(MemoryTag), min_size=1)


class Operated(RuleBasedStateMachine):
    """One service; `directories` and the oracles of what they hold are given by the test."""

    directories: tuple
    options: dict

    @initialize()
    def load(self):
        self.driven = drive(self.directories[0], native_operators="off", **self.options)
        self.sources = {"default": 0}
        self.asleep = frozenset()
        self.lost = False
        self.replaced = False
        self.paused = False
        self.live = {}
        self.num_started = 0

    @property
    def waiting(self):
        return self.lost and MemoryTag.WEIGHTS not in self.asleep

    @property
    def ready(self):
        return not self.asleep and not self.waiting

    @rule(length=st.integers(1, 20), num_tokens=st.integers(0, 8), n=st.integers(1, 2))
    def start(self, length, num_tokens, n):
        rid = f"r{self.num_started}"
        self.num_started += 1
        wanted = request(length, num_tokens, first=length, n=n)
        self.driven.start(rid, wanted)
        if self.ready:
            self.live[rid] = wanted
        else:
            self.driven.tick()
            assert isinstance(self.driven.error(rid), EngineAsleepError)

    @rule(count=st.integers(1, 6))
    def tick(self, count):
        for _ in range(count):
            self.driven.tick()
        self._look()

    @rule(tags=TAGS)
    def sleep(self, tags):
        self._look()
        fresh = tags - self.asleep
        busy = any(rid not in self.driven.ended for rid in self.live)
        applied = self.driven.service.control(Sleep(tags))
        if not fresh or not self.ready or self.paused or not busy:
            assert applied
        # A loop that looks ahead may find, when it lands, that all have ended.
        if applied:
            self.asleep |= fresh
            if MemoryTag.WEIGHTS in fresh:
                self.lost = self.replaced

    @rule(tags=TAGS)
    def wake(self, tags):
        assert self.driven.service.control(Wake(tags))
        self.asleep -= tags

    @rule(source=st.integers(0, 1), in_parts=st.booleans(), named=st.booleans())
    def update(self, source, in_parts, named):
        version = f"v{len(self.sources)}"
        directory = self.directories[source]
        if in_parts:
            ops = [ReplaceWeights({n: t}, version) for n, t in weights_of(directory).items()]
        else:
            ops = [LoadWeights(str(directory), version)]
        for op in ops:
            if MemoryTag.WEIGHTS in self.asleep:
                with pytest.raises(InvalidRequestError):
                    self.driven.service.control(op)
                return
            assert self.driven.service.control(op)
        self.sources[version] = source
        self.replaced = in_parts or source != 0
        self.lost = False

    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode):
        assert self.driven.service.control(Pause(mode))
        self.paused = True

    @rule()
    def go_on(self):
        assert self.driven.service.control(Continue())
        self.paused = False

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        self.driven.service.cancel(data.draw(st.sampled_from(sorted(self.live))))

    @invariant()
    def says_what_it_holds(self):
        statistics = self.driven.service.statistics()
        assert statistics.asleep == self.asleep
        assert statistics.waiting_for_weights == self.waiting
        assert statistics.paused == self.paused

    def teardown(self):
        if not hasattr(self, "driven"):
            return
        self.wake(frozenset(MemoryTag))
        if self.waiting:
            self.update(0, False, False)
        self.go_on()
        self.driven.finish()
        self._look()
        assert not self.live
        self.driven.service.close()

    def _look(self):
        """Check whoever has ended since."""
        for rid in [rid for rid in self.live if rid in self.driven.ended]:
            wanted = self.live.pop(rid)
            event = self.driven.ended[rid]
            assert not isinstance(event, Failed), event
            assert isinstance(event, Final)
            models = {version: ORACLES[source] for version, source in self.sources.items()}
            check_spans(event.payload, wanted.input_ids, models)
            if not event.cancelled:
                for completion in self.driven.output(rid).completions:
                    assert len(completion.token_ids) == wanted.sampling.max_new_tokens


ORACLES = {}


@pytest.mark.parametrize("num_examples", [6, pytest.param(24, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "options", [{}, {"speculate": True}, {"pool_tokens": 64, "host_pool_tokens": 32}]
)
def test_any_sequence_of_operations(tmp_path_factory, options, num_examples):
    if not ORACLES:
        base = tmp_path_factory.mktemp("machine")
        for source in range(2):
            ORACLES[source] = oracle(save(base / str(source), source), native_operators="off")
        Operated.directories = (base / "0", base / "1")

    class Machine(Operated):
        pass

    Machine.options = {"max_step_tokens": 16, **options}
    case = Machine.TestCase
    case.settings = settings(max_examples=num_examples, stateful_step_count=25)
    case().runTest()
