"""A pool told in the plainest way: what a registry must look like after any course of events."""

from __future__ import annotations

from dataclasses import dataclass, field

LEASE_S, FORGET_S, MAX_FAILURES = 15, 300, 3


@dataclass
class Entry:
    """One (model, port). `failures` is None until a first probe, then how many failed last."""

    leased_at_s: float | None
    healthy: bool
    failures: int = 0
    probed: bool = False
    removed: bool = False
    requests: int = 0


@dataclass
class PoolModel:
    now_s: float = 0.0
    entries: dict[tuple[str, int], Entry] = field(default_factory=dict)
    refused_until_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def register(self, key: tuple[str, int], *, leased: bool) -> bool:
        if leased and self.refused_until_s.get(key, 0.0) > self.now_s:
            self.refused_until_s[key] = self.now_s + 60
            return False
        entry = self.entries.get(key)
        if entry is None or entry.removed:
            requests = 0 if entry is None else entry.requests
            self.entries[key] = Entry(self.now_s if leased else None, leased, requests=requests)
        elif not leased:
            entry.leased_at_s = None
        elif entry.leased_at_s is not None:
            entry.leased_at_s = self.now_s
        if not leased:
            self.refused_until_s.pop(key, None)
        return True

    def heartbeat(self, key: tuple[str, int]) -> bool:
        entry = self.entries.get(key)
        if entry is None or entry.removed:
            return False
        if entry.leased_at_s is not None:
            entry.leased_at_s = self.now_s
        return True

    def remove(self, key: tuple[str, int]) -> bool:
        entry = self.entries.get(key)
        if entry is None:
            return False
        if entry.leased_at_s is not None:
            self.refused_until_s[key] = self.now_s + 60
        entry.removed = True
        self._drop_idle()
        return True

    def observe(self, key: tuple[str, int], outcome: str) -> None:
        entry = self.entries.get(key)
        if entry is None:
            return
        if outcome == "healthy":
            entry.healthy, entry.failures, entry.probed = True, 0, True
            return
        entry.failures += MAX_FAILURES if outcome == "unreachable" else 1
        entry.probed = True
        if entry.failures >= MAX_FAILURES:
            entry.healthy = False

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for entry in self.entries.values():
            if (
                entry.leased_at_s is not None
                and self.now_s >= entry.leased_at_s + LEASE_S + FORGET_S
            ):
                entry.removed = True
        self._drop_idle()

    def candidates(self, model: str) -> list[tuple[str, int]]:
        return [key for key, entry in self.entries.items() if key[0] == model and self.ready(entry)]

    def ready(self, entry: Entry) -> bool:
        return entry.healthy and not entry.removed and not self.expired(entry)

    def expired(self, entry: Entry) -> bool:
        return entry.leased_at_s is not None and self.now_s >= entry.leased_at_s + LEASE_S

    def state(self, entry: Entry) -> str:
        if entry.removed:
            return "draining"
        if self.ready(entry):
            return "ready"
        if self.expired(entry) or entry.probed:
            return "unhealthy"
        return "starting"

    def release(self, key: tuple[str, int]) -> None:
        self.entries[key].requests -= 1
        self._drop_idle()

    def _drop_idle(self) -> None:
        for key in [key for key, entry in self.entries.items() if entry.removed]:
            if self.entries[key].requests == 0:
                del self.entries[key]
