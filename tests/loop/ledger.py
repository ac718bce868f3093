"""A loop with requests of the toy nodes, whose events are checked as they come."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.loop.eviction import EvictionPolicy, LeastRecentlyUsed
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.schema.events import Delta, Event, Failed, Final, Scheduled
from phalanx.step.engine import StepEngine
from phalanx.step.resources.kv_cache import KVCache
from phalanx.testing.step_models import cache_reader_engine, expected_tokens
from phalanx.testing.token_request import TokenRequest
from tests.step.caches import in_flight

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3)


def prompt_of(length: int, first: int = 0) -> tuple[int, ...]:
    """A prompt of `length` tokens; other numbers `first` give others."""
    return tuple((PROMPT[i % 16] + 7 * i + 13 * first) % 90 for i in range(length))


class Ledger:
    """Events by request: `Scheduled` once and before any delta, one end, nothing behind it."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.scheduled: set[str] = set()
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Final | Failed] = {}
        self.order: list[str] = []

    def start(self, rid: str) -> None:
        assert rid not in self.live
        self.live.add(rid)
        self.scheduled.discard(rid)
        self.tokens[rid] = []
        self.ended.pop(rid, None)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            rid = event.rid
            assert rid in self.live, f"{event} of a request that is not live"
            match event:
                case Scheduled():
                    assert rid not in self.scheduled, f"{rid} was scheduled twice"
                    assert not self.tokens[rid]
                    self.scheduled.add(rid)
                case Delta(_, payload):
                    assert rid in self.scheduled, f"{rid} had a delta before it was scheduled"
                    assert payload, "an empty delta"
                    self.tokens[rid] += payload
                case Final() | Failed():
                    self.live.discard(rid)
                    self.ended[rid] = event
                    self.order.append(rid)
                    if isinstance(event, Final):
                        assert event.payload == tuple(self.tokens[rid]), "deltas make the output"


class Bench:
    """A loop, its engine and the ledger of its events."""

    def __init__(
        self,
        engine: StepEngine,
        *,
        tokens: int = 64,
        running: int = 8,
        eviction: EvictionPolicy | None = None,
        kind: type[StepLoop] = StepLoop,
    ) -> None:
        self.engine = engine
        self.budget = Budget(tokens, running)
        self.loop = kind(engine, self.budget, eviction or LeastRecentlyUsed())
        self.ledger = Ledger()
        self.states: dict[str, TokenRequest] = {}

    @property
    def cache(self) -> KVCache:
        cache = self.engine.resource("kv")
        assert isinstance(cache, KVCache)
        return cache

    @property
    def looks_ahead(self) -> bool:
        """Whether a step may be in flight between two ticks."""
        return type(self.loop) is not StepLoop

    def start(self, rid: str, length: int, count: int, priority: int = 0, **options) -> None:
        prompt = options.pop("prompt", prompt_of(length, len(self.states)))
        published = options.pop("published", None)
        kind = options.pop("kind", TokenRequest)
        state = self.states[rid] = kind(prompt, count, **options)
        self.ledger.start(rid)
        self.loop.start(rid, state, priority, published)

    def tick(self) -> list[Event]:
        events = self.loop.tick()
        self.ledger.take(events)
        self.check_counters()
        return events

    def check_counters(self) -> None:
        loop, cache = self.loop, self.cache
        assert 0 <= loop.num_running <= self.budget.max_running
        assert loop.num_waiting >= 0
        # Those whose end is reported by the next tick are gone already.
        assert loop.num_running + loop.num_waiting <= len(self.ledger.live)
        assert 0 <= loop.last_batch_size <= self.budget.max_running
        pool = cache.config.num_pages * cache.config.page_size
        assert 0 <= cache.used_tokens <= pool
        assert 0 <= loop.num_offloaded <= loop.num_waiting
        assert loop.idle == (loop.num_running + loop.num_waiting == 0)
        if not self.looks_ahead:
            assert in_flight(cache) == [], "between two steps nothing is in flight"

    def finish(self, max_ticks: int = 2000, wakes: int = 0) -> int:
        """Tick until nobody is left; the number of ticks. Whoever waits is woken up to so often."""
        for num_ticks in range(max_ticks + 1):
            if not self.loop.busy and self.ledger.live and wakes:
                self.engine.waker.wake()
                wakes -= 1
            if not self.loop.busy:
                assert not self.ledger.live
                assert self.loop.idle
                assert self.engine.at_rest()
                return num_ticks
            self.tick()
        raise AssertionError(f"{sorted(self.ledger.live)} live after {max_ticks} ticks")

    def output(self, rid: str) -> tuple[int, ...]:
        event = self.ledger.ended[rid]
        assert isinstance(event, Final), event
        return event.payload

    def error(self, rid: str) -> Exception:
        event = self.ledger.ended[rid]
        assert isinstance(event, Failed), event
        return event.error


def bench_of(
    num_pages: int = 64, page_size: int = 4, *, node=None, probe=None, host_pages=0, **options
) -> Bench:
    engine = cache_reader_engine(
        num_pages, page_size, node=node, probe=probe, host_pages=host_pages
    )
    return Bench(engine, **options)


def expected(bench: Bench, rid: str) -> tuple[int, ...]:
    state = bench.states[rid]
    return expected_tokens(state.prompt, state.count)
