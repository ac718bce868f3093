"""Any course of events leaves the registry as the plain model says, and its snapshots honest."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phalanx.errors import NoServerError, UnknownModelError
from phalanx.routing.endpoint import Endpoint, Scheme
from phalanx.routing.pool_policy import PoolPolicy
from phalanx.routing.pool_registry import PoolRegistry
from phalanx.routing.publisher import Publisher
from phalanx.routing.registration import Probe, identify
from phalanx.routing.resolver import Selector
from phalanx.routing.snapshot import ServerState
from phalanx.testing.clock import ManualClock
from tests.routing.pool_model import PoolModel

KEYS = st.tuples(st.sampled_from(["pi05", "act"]), st.sampled_from([1, 2, 3]))


def endpoint(port: int) -> Endpoint:
    return Endpoint.parse(f"10.0.0.1:{port}")


def identity(key: tuple[str, int]) -> str:
    return identify(key[0], endpoint(key[1]))


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(0.0)
        self.registry = PoolRegistry(Publisher("e"), self.clock, PoolPolicy())
        self.model = PoolModel()
        self.tickets: list[tuple[object, tuple[str, int]]] = []
        self.last = self.registry.publisher.snapshot
        self.heard = [self.last]
        self.registry.publisher.listen(self.heard.append)

    @rule(key=KEYS)
    def register_managed(self, key):
        self.model.register(key, leased=False)
        server = self.registry.register_managed(key[0], endpoint(key[1]))
        assert server.server_id == identity(key)

    @rule(key=KEYS)
    def register_self(self, key):
        accepted = self.model.register(key, leased=True)
        try:
            server = self.registry.register_self(key[0], endpoint(key[1]))
        except NoServerError:
            assert not accepted
        else:
            assert accepted
            assert server.server_id == identity(key)

    @rule(key=KEYS)
    def heartbeat(self, key):
        assert self.registry.heartbeat(identity(key)) == self.model.heartbeat(key)

    @rule(key=KEYS)
    def remove(self, key):
        assert self.registry.remove(identity(key)) == self.model.remove(key)

    @rule(key=KEYS, probe=st.sampled_from(Probe))
    def observe(self, key, probe):
        self.model.observe(key, probe.value)
        self.registry.observe(identity(key), probe, probe.value)

    @rule(key=KEYS)
    def connect_failed(self, key):
        self.model.observe(key, "unreachable")
        self.registry.connect_failed(identity(key), "refused")

    @rule(key=KEYS)
    def suspect(self, key):
        self.registry.suspect(identity(key))

    @rule(seconds=st.sampled_from([0.5, 1, 5, 14, 15, 59, 100, 300]))
    def pass_time(self, seconds):
        self.clock.advance(seconds)
        self.model.pass_time(seconds)
        self.registry.expire()

    @rule(model=st.sampled_from(["pi05", "act", "other"]))
    def acquire(self, model):
        candidates = self.model.candidates(model)
        known = [key for key in self.model.entries if key[0] == model]
        try:
            ticket = self.registry.acquire(Selector(Scheme.GRPC, model))
        except UnknownModelError:
            assert not known
            return
        except NoServerError:
            assert known and not candidates
            return
        key = (model, ticket.server.endpoint.port)
        fewest = min(self.model.entries[each].requests for each in candidates)
        assert key in candidates
        assert self.model.entries[key].requests == fewest
        self.model.entries[key].requests += 1
        self.tickets.append((ticket, key))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def release(self, data):
        ticket, key = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        ticket.release()
        ticket.release()
        self.model.release(key)

    @rule()
    def probe_what_is_due(self):
        probed = set()
        for _ in range(2):
            for server in self.registry.due():
                assert server.state is not ServerState.DRAINING
                assert server.server_id not in probed, "it was probed just now"
                probed.add(server.server_id)
                self.registry.observe(server.server_id, Probe.HEALTHY)
                self.model.observe((server.model_name, server.endpoint.port), "healthy")
            for key in self.model.entries:
                self.registry.suspect(identity(key))
        next_s = self.registry.next_probe_s()
        assert next_s is None or next_s > self.clock.monotonic_s()

    @invariant()
    def published_is_what_the_model_says(self):
        shown = self.registry.publisher.snapshot
        states = {server.server_id: server.state.value for server in shown.servers}
        assert states == {
            identity(key): self.model.state(entry) for key, entry in self.model.entries.items()
        }
        for key, entry in self.model.entries.items():
            assert self.registry.load.count(identity(key)) == entry.requests

    @invariant()
    def revisions_count_the_changes(self):
        heard, self.heard = self.heard, [self.heard[-1]]
        for before, after in zip(heard, heard[1:], strict=False):
            assert after.revision == before.revision + 1
            assert after.servers != before.servers
            assert after.epoch == before.epoch

    @invariant()
    def an_expiry_is_announced(self):
        next_s = self.registry.next_expiry_s()
        leased = [e for e in self.model.entries.values() if e.leased_at_s is not None]
        assert (next_s is None) == all(entry.removed for entry in leased)
        assert next_s is None or next_s > self.clock.monotonic_s()

    def teardown(self):
        for ticket, key in self.tickets:
            ticket.release()
            self.model.release(key)
        self.published_is_what_the_model_says()
        assert self.registry.load.total == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


class LongPoolMachine(PoolMachine):
    """The same for longer."""


TestPoolAtLength = pytest.mark.long(LongPoolMachine.TestCase)
TestPoolAtLength.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
