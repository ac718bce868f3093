"""Registration, thresholds, leases and removal, on a clock that the test moves."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError, NoServerError, UnknownModelError
from phalanx.routing.endpoint import Endpoint, Scheme
from phalanx.routing.pool_policy import PoolPolicy
from phalanx.routing.pool_registry import PoolRegistry
from phalanx.routing.publisher import Publisher
from phalanx.routing.registration import Probe
from phalanx.routing.resolver import Selector
from phalanx.routing.snapshot import ServerState
from phalanx.testing.clock import ManualClock

PI05 = Selector(Scheme.GRPC, "pi05")


class Case:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = PoolRegistry(Publisher("e"), self.clock, PoolPolicy())

    def managed(self, port: int = 50063) -> str:
        server = self.registry.register_managed("pi05", Endpoint.parse(f"10.0.0.11:{port}"))
        return server.server_id

    def ready(self, port: int = 50063) -> str:
        server_id = self.managed(port)
        self.registry.observe(server_id, Probe.HEALTHY)
        return server_id

    def leased(self, port: int = 50063) -> str:
        server = self.registry.register_self("pi05", Endpoint.parse(f"10.0.0.11:{port}"))
        return server.server_id

    def state(self, server_id: str) -> ServerState | None:
        server = self.registry.publisher.snapshot.by_id.get(server_id)
        return None if server is None else server.state

    def chosen(self) -> str:
        return self.registry.acquire(PI05).server.server_id


@pytest.fixture
def case() -> Case:
    return Case()


def test_registering_the_same_again_gives_the_same_id_and_changes_nothing(case):
    first = case.ready()
    revision = case.registry.publisher.snapshot.revision
    again = case.registry.register_managed("pi05", Endpoint.parse("grpc://10.0.0.11:50063"))
    assert again.server_id == first
    assert case.registry.publisher.snapshot.revision == revision
    other = case.registry.register_managed("act", Endpoint.parse("10.0.0.11:50063"))
    assert other.server_id != first
    assert Case().managed() == first, "another gateway gives the same pair the same id"


@pytest.mark.parametrize("name", ["", " a", "a\nb", "x" * 201])
def test_a_model_name_that_cannot_be_shown_is_refused(case, name):
    with pytest.raises(ConfigurationError, match="model name"):
        case.registry.register_managed(name, Endpoint.parse("a:1"))


def test_r101_a_managed_server_gets_requests_after_its_first_success(case):
    server_id = case.managed()
    assert case.state(server_id) is ServerState.STARTING
    with pytest.raises(NoServerError, match="1 starting"):
        case.chosen()
    assert [server.server_id for server in case.registry.due()] == [server_id]
    case.registry.observe(server_id, Probe.HEALTHY)
    assert case.chosen() == server_id


def test_r110_three_failures_in_a_row_take_a_server_from_selection_and_one_success_brings_it_back(
    case,
):
    server_id = case.ready()
    for probe in (Probe.FAILED, Probe.FAILED, Probe.HEALTHY, Probe.FAILED, Probe.FAILED):
        case.registry.observe(server_id, probe, "time-out")
        assert case.state(server_id) is ServerState.READY
    case.registry.observe(server_id, Probe.FAILED, "time-out")
    assert case.state(server_id) is ServerState.UNHEALTHY
    assert case.registry.publisher.snapshot.by_id[server_id].detail == "time-out"
    with pytest.raises(NoServerError, match="time-out"):
        case.chosen()
    case.registry.observe(server_id, Probe.HEALTHY)
    assert case.chosen() == server_id


def test_a_server_that_cannot_be_reached_is_down_at_once(case):
    first, second = case.ready(1), case.ready(2)
    case.registry.connect_failed(first, "connection refused")
    assert case.state(first) is ServerState.UNHEALTHY
    assert {case.chosen() for _ in range(3)} == {second}
    case.registry.observe(second, Probe.UNREACHABLE, "connection refused")
    assert case.state(second) is ServerState.UNHEALTHY


def test_a_server_that_is_down_is_probed_more_often(case):
    server_id = case.managed()
    policy = case.registry.policy
    assert case.registry.due()
    assert case.registry.next_probe_s() is None, "one probe of a server at a time"
    case.registry.observe(server_id, Probe.HEALTHY)
    assert case.registry.next_probe_s() == case.clock.monotonic_s() + policy.probe_interval_s
    assert case.registry.due() == []
    case.registry.connect_failed(server_id, "refused")
    assert case.registry.next_probe_s() == case.clock.monotonic_s() + policy.down_interval_s
    case.clock.advance(policy.down_interval_s)
    assert len(case.registry.due()) == 1


def test_a_lease_that_is_not_renewed_runs_out(case):
    server_id = case.leased()
    assert case.state(server_id) is ServerState.READY
    case.clock.advance(14)
    assert case.registry.heartbeat(server_id)
    case.clock.advance(14.9)
    case.registry.expire()
    assert case.state(server_id) is ServerState.READY
    case.clock.advance(0.1)
    assert case.registry.next_expiry_s() == case.clock.monotonic_s()
    case.registry.expire()
    assert case.state(server_id) is ServerState.UNHEALTHY
    case.registry.observe(server_id, Probe.HEALTHY)
    assert case.state(server_id) is ServerState.UNHEALTHY, "a probe does not renew a lease"
    assert case.registry.heartbeat(server_id)
    assert case.state(server_id) is ServerState.READY


def test_a_server_whose_lease_ran_out_long_ago_is_forgotten(case):
    server_id = case.leased()
    case.clock.advance(15)
    case.registry.expire()
    assert case.registry.next_expiry_s() == case.clock.monotonic_s() + 300
    case.clock.advance(300)
    case.registry.expire()
    assert case.state(server_id) is None
    assert not case.registry.heartbeat(server_id), "it has to register again"
    assert case.leased() == server_id


def test_r102_a_removed_server_finishes_what_it_has_and_then_disappears(case):
    first, second = case.ready(1), case.ready(2)
    tickets = [case.registry.acquire(PI05) for _ in range(4)]
    assert case.registry.remove(first)
    assert case.state(first) is ServerState.DRAINING
    assert not case.registry.heartbeat(first), "it is on its way out"
    case.clock.advance(60)
    assert [server.server_id for server in case.registry.due()] == [second]
    assert {case.chosen() for _ in range(4)} == {second}
    mine = [ticket for ticket in tickets if ticket.server.server_id == first]
    mine[0].release()
    assert case.state(first) is ServerState.DRAINING
    assert case.registry.remove(first), "removing it again changes nothing"
    mine[1].release()
    assert case.state(first) is None
    assert not case.registry.remove(first)


def test_r102_a_server_without_requests_disappears_when_it_is_removed(case):
    server_id = case.ready()
    assert case.registry.remove(server_id)
    assert case.registry.publisher.snapshot.servers == ()
    with pytest.raises(UnknownModelError):
        case.chosen()


def test_a_server_that_is_added_while_it_drains_is_probed_first_and_keeps_its_count(case):
    server_id = case.ready()
    ticket = case.registry.acquire(PI05)
    case.registry.remove(server_id)
    assert case.managed() == server_id
    assert case.state(server_id) is ServerState.STARTING
    case.registry.observe(server_id, Probe.HEALTHY)
    assert case.registry.load.count(server_id) == 1
    ticket.release()
    assert case.state(server_id) is ServerState.READY


def test_an_operators_removal_holds_against_a_server_that_goes_on_asking(case):
    server_id = case.leased()
    case.registry.remove(server_id)
    assert not case.registry.heartbeat(server_id)
    for _ in range(3):
        case.clock.advance(50)
        with pytest.raises(NoServerError, match="an operator has removed"):
            case.leased()
    case.clock.advance(60)
    assert case.leased() == server_id
    case.registry.remove(server_id)
    case.managed()
    assert case.leased() == server_id, "an operator has added it again"


def test_what_was_registered_before_a_restart_is_probed_before_it_gets_requests(case):
    endpoint = Endpoint.parse("10.0.0.11:1")
    leased = case.registry.restore("pi05", endpoint, managed=False)
    managed = case.registry.restore("pi05", Endpoint.parse("10.0.0.11:2"), managed=True)
    assert (leased.managed, managed.managed) == (False, True)
    assert {leased.state, managed.state} == {ServerState.STARTING}
    assert len(case.registry.due()) == 2
    case.clock.advance(15)
    case.registry.expire()
    assert case.state(leased.server_id) is ServerState.UNHEALTHY
    assert case.state(managed.server_id) is ServerState.STARTING


def test_r107_routing_keeps_no_session(case):
    """Successive requests of one caller, who is not known here, go to both servers."""
    servers = {case.ready(1), case.ready(2)}
    seen = []
    for _ in range(6):
        with case.registry.acquire(PI05) as ticket:
            seen.append(ticket.server.server_id)
    assert set(seen) == servers
    assert all(one != next_ for one, next_ in zip(seen, seen[1:], strict=False))


@pytest.mark.parametrize("values", [{"lease_s": 0.0}, {"heartbeat_s": 20.0}, {"max_failures": 0}])
def test_times_that_cannot_work_are_refused(values):
    with pytest.raises(ConfigurationError, match=next(iter(values))):
        PoolPolicy(**values)
