"""The pool of servers that operators registered or that registered themselves, and their health.

Plain synchronous code of one thread: whoever probes, keeps time and sends requests tells it what
happened, and each change is published before the call returns. A server leaves for good when it has
been removed and its last request has left.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.clock import Clock
from phalanx.errors import ConfigurationError, NoServerError
from phalanx.routing.endpoint import Endpoint
from phalanx.routing.load import InFlight, Ticket
from phalanx.routing.pool_policy import PoolPolicy
from phalanx.routing.publisher import Publisher
from phalanx.routing.registration import Probe, Registration, identify
from phalanx.routing.resolver import Selector, resolve
from phalanx.routing.snapshot import Server, ServerState

MAX_MODEL_NAME = 200
REFUSAL_S = 60.0


class PoolRegistry:
    """Registered servers by id. Registering the same model and endpoint again changes nothing and
    gives the same id.

    `mirrors` names the gateway whose servers these are: then servers register themselves there.
    """

    def __init__(
        self,
        publisher: Publisher,
        clock: Clock,
        policy: PoolPolicy,
        *,
        mirrors: str | None = None,
    ) -> None:
        self.publisher = publisher
        self.policy = policy
        self.mirrors = mirrors
        self._clock = clock
        self._servers: dict[str, Registration] = {}
        self._shown: dict[str, Server] = {}
        self._refused_until_s: dict[str, float] = {}
        self.load = InFlight(clock, on_idle=self._idle)

    def register_managed(self, model_name: str, endpoint: Endpoint) -> Server:
        """Add a server on an operator's word. It gets requests after its first successful probe."""
        known = self._entry(model_name, endpoint)
        known.lease_until_s, known.expired = None, False
        self._refused_until_s.pop(known.server_id, None)
        self._show(known)
        return known.server()

    def register_self(self, model_name: str, endpoint: Endpoint) -> Server:
        """Add a server on its own word, or renew its lease. It gets requests from now on.

        Raises `NoServerError` for a server that an operator has removed and that goes on asking,
        and for every server where the pool is another gateway's.
        """
        if self.mirrors is not None:
            raise NoServerError(f"this gateway has the servers of {self.mirrors}: register there")
        identity, now_s = identify(model_name, endpoint), self._now()
        if self._refused_until_s.get(identity, now_s) > now_s:
            self._refused_until_s[identity] = now_s + REFUSAL_S
            raise NoServerError(
                f"an operator has removed {endpoint} from model {model_name!r}; register it with"
                f" POST /v1/backends, or stop asking for {REFUSAL_S:g} s"
            )
        is_new = not self._is_serving(identity)
        known = self._entry(model_name, endpoint)
        if is_new:
            known.lease_until_s = now_s
            known.health = ServerState.READY
        self._renew(known)
        self._show(known)
        return known.server()

    def restore(self, model_name: str, endpoint: Endpoint, *, managed: bool) -> Server:
        """Add a server that was registered before a restart, to be probed before it gets requests.

        One that had registered itself gets a lease, which it has to renew.
        """
        known = self._entry(model_name, endpoint)
        if not managed:
            known.lease_until_s = self._now()
        self._renew(known)
        self._show(known)
        return known.server()

    def heartbeat(self, server_id: str) -> bool:
        """Renew a lease; False where there is no such server, which then has to register again."""
        known = self._servers.get(server_id)
        if known is None or known.draining:
            return False
        self._renew(known)
        self._show(known)
        return True

    def remove(self, server_id: str) -> bool:
        """Give the server no more requests and drop it when its last one has left.

        False where there is none of that id.
        """
        known = self._servers.get(server_id)
        if known is None:
            return False
        if not known.managed:
            self._refused_until_s[server_id] = self._now() + REFUSAL_S
        self._drain(known)
        return True

    def acquire(self, selector: Selector, exclude: frozenset[str] = frozenset()) -> Ticket:
        """Count a request at the least busy server that may get it, or raise as `resolve` does."""
        return self.load.acquire(resolve(self.publisher.snapshot, selector), exclude)

    def connect_failed(self, server_id: str, detail: str) -> None:
        """A request found no connection to the server, so that it is down now, and never started."""
        known = self._servers.get(server_id)
        if known is None:
            return
        self._fail(known, self.policy.max_failures, detail)
        if known.probe_at_s is not None:
            known.probe_at_s = min(known.probe_at_s, self._now() + self.policy.down_interval_s)
        self._show(known)

    def suspect(self, server_id: str) -> None:
        """A request that had started was lost at the server: probe it soon, as one that is down."""
        known = self._servers.get(server_id)
        if known is not None and known.probe_at_s is not None:
            soon_s = known.probed_s + self.policy.down_interval_s
            known.probe_at_s = min(known.probe_at_s, max(soon_s, self._now()))

    def due(self) -> list[Server]:
        """The servers to probe now; each answer is to be told to `observe`."""
        now_s = self._now()
        chosen = [known for known in self._probed() if known.probe_at_s is not None]
        chosen = [known for known in chosen if (known.probe_at_s or 0.0) <= now_s]
        for known in chosen:
            known.probe_at_s = None
        return [known.server() for known in chosen]

    def observe(self, server_id: str, probe: Probe, detail: str = "") -> None:
        """A probe of the server ended; `detail` says why it failed, in words."""
        known = self._servers.get(server_id)
        if known is None:
            return
        if probe is Probe.HEALTHY:
            known.health, known.detail, known.num_failures = ServerState.READY, "", 0
            pause_s = self.policy.probe_interval_s
        else:
            at_once = probe is Probe.UNREACHABLE
            self._fail(known, self.policy.max_failures if at_once else 1, detail)
            pause_s = self.policy.down_interval_s
        known.probed_s = self._now()
        known.probe_at_s = known.probed_s + pause_s
        self._show(known)

    def next_probe_s(self) -> float | None:
        """When `due` will next have something, by the monotonic clock; None: not before a change."""
        times = [known.probe_at_s for known in self._probed() if known.probe_at_s is not None]
        return min(times, default=None)

    def expire(self) -> None:
        """Take leases that have run out, and forget the servers whose lease ran out long ago."""
        now_s = self._now()
        for known in list(self._servers.values()):
            if known.lease_until_s is None or known.draining:
                continue
            if known.lease_until_s + self.policy.forget_s <= now_s:
                self._drain(known)
            elif known.lease_until_s <= now_s:
                known.expired = True
                self._show(known)
        self._refused_until_s = {
            identity: until for identity, until in self._refused_until_s.items() if until > now_s
        }

    def next_expiry_s(self) -> float | None:
        """When `expire` will next have something to do, by the monotonic clock."""
        return min(
            (
                known.lease_until_s + (self.policy.forget_s if known.expired else 0.0)
                for known in self._servers.values()
                if known.lease_until_s is not None and not known.draining
            ),
            default=None,
        )

    def _now(self) -> float:
        return self._clock.monotonic_s()

    def _probed(self) -> Iterable[Registration]:
        return (known for known in self._servers.values() if not known.draining)

    def _is_serving(self, server_id: str) -> bool:
        known = self._servers.get(server_id)
        return known is not None and not known.draining

    def _entry(self, model_name: str, endpoint: Endpoint) -> Registration:
        """The registration of this pair, a new one where there is none or it is on its way out."""
        check_model_name(model_name)
        identity = identify(model_name, endpoint)
        if not self._is_serving(identity):
            self._servers[identity] = Registration(
                identity, model_name, endpoint, None, self._now(), ServerState.STARTING
            )
        return self._servers[identity]

    def _renew(self, known: Registration) -> None:
        if known.lease_until_s is not None:
            known.lease_until_s, known.expired = self._now() + self.policy.lease_s, False

    def _fail(self, known: Registration, num_failures: int, detail: str) -> None:
        known.num_failures += num_failures
        if known.num_failures >= self.policy.max_failures or known.health is not ServerState.READY:
            known.health, known.detail = ServerState.UNHEALTHY, detail

    def _drain(self, known: Registration) -> None:
        known.draining = True
        if self.load.count(known.server_id) == 0:
            self._drop(known)
        else:
            self._show(known)

    def _drop(self, known: Registration) -> None:
        del self._servers[known.server_id]
        self.load.forget(known.server_id)
        self._show(known)

    def _idle(self, server_id: str) -> None:
        known = self._servers.get(server_id)
        if known is not None and known.draining:
            self._drop(known)

    def _show(self, known: Registration) -> None:
        """Publish what the server looks like now, or that it is gone."""
        identity, server = known.server_id, known.server()
        if self._servers.get(identity) is not known:
            self._shown.pop(identity, None)
        elif self._shown.get(identity) == server:
            return
        else:
            self._shown[identity] = server
        servers = tuple(self._shown.values())
        while not self.publisher.publish(
            servers, expected_revision=self.publisher.snapshot.revision
        ):
            pass  # somebody else's snapshot came in between


def check_model_name(name: str) -> None:
    """Refuse a name that cannot be shown on one line or sent in a header."""
    if not name or len(name) > MAX_MODEL_NAME or not name.isprintable() or name != name.strip():
        raise ConfigurationError(
            f"model name {name[:40]!r} must have 1 to {MAX_MODEL_NAME} printable characters, and"
            " no space at its ends"
        )
