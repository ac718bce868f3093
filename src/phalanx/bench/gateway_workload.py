"""Sizes of the gateway benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Traffic:
    """One kind of request: `num_alone` of them one after another, then `num_together` with
    `concurrency` in flight.
    """

    key: str
    label: str
    num_alone: int
    num_together: int
    concurrency: int


TRAFFIC = (
    Traffic("json", "1 KB JSON", 2000, 20_000, 32),
    Traffic("binary", "600 KB binary", 400, 2000, 32),
    Traffic("sse", "SSE of 64 events", 200, 1000, 32),
    Traffic("role-json", "1 KB JSON to a role", 2000, 20_000, 32),
    Traffic("role-sse", "SSE of 64 events of a role", 200, 1000, 32),
    Traffic("websocket", "600 KB WebSocket frame", 400, 1000, 8),
    Traffic("grpc", "600 KB gRPC", 100, 300, 8),
)
BALANCE = "balance"
PARTS = (*(traffic.key for traffic in TRAFFIC), BALANCE)


@dataclass(frozen=True)
class GatewayWorkload:
    """How much of everything; all of it is bounded by these counts.

    For `balance`, `num_balanced` requests with `balanced_in_flight` of them at once go to servers
    that take `delays_s`.
    """

    traffic: tuple[Traffic, ...] = TRAFFIC
    repeats: int = 5
    num_balanced: int = 200
    balanced_in_flight: int = 8
    delays_s: tuple[float, float] = (0.5, 0.02)

    @classmethod
    def quick(cls) -> GatewayWorkload:
        """A fifth of it."""
        return cls(
            traffic=tuple(
                replace(each, num_alone=each.num_alone // 5, num_together=each.num_together // 5)
                for each in TRAFFIC
            ),
            repeats=3,
        )
