"""Sizes of the dispatch benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import ConfigurationError

REPLICA_PARTS = ("scaling", "stopped", "death", "memory")
PARTS = ("round-trips", *REPLICA_PARTS)
"""What the benchmark consists of."""


@dataclass(frozen=True)
class Payload:
    """An observation of `num_images` images of 224x224x3 bytes and a float32 state, and the
    float32 action that answers it; `num_requests` round trips a round.
    """

    key: str
    label: str
    num_images: int
    state_elements: int
    reply_elements: int
    num_requests: int

    @property
    def num_bytes(self) -> int:
        return self.num_images * 224 * 224 * 3 + 4 * self.state_elements

    def sizes(self) -> dict[str, int]:
        """As a worker is told them."""
        return {
            "num_images": self.num_images,
            "state_elements": self.state_elements,
            "reply_elements": self.reply_elements,
        }


def payloads(small: int, observation: int, large: int) -> tuple[Payload, ...]:
    """1 KB both ways; 600 KB of three images and a state, and 8 MB, both with 6.4 KB back."""
    return (
        Payload("1kb", "1 KB", 0, 250, 250, small),
        Payload("600kb", "600 KB", 3, 37_104, 1600, observation),
        Payload("8mb", "8 MB", 0, 2_000_000, 1600, large),
    )


@dataclass(frozen=True)
class DispatchWorkload:
    """How much of everything; all of it is bounded by these counts.

    `num_steps` computing steps of `step_s` a replica and round; `num_beside` requests in each of
    `beside_rounds` beside a busy and a stopped replica, with `num_waiting` for the stopped one;
    `num_deaths` trials with `num_pending` requests; `num_tiny` requests in all, `tiny_chunk` at a
    time.
    """

    payloads: tuple[Payload, ...] = payloads(2000, 1000, 100)
    workers: tuple[int, ...] = (1, 4)
    in_flight: tuple[int, ...] = (1, 8, 64)
    repeats: int = 3
    num_steps: int = 100
    step_s: float = 0.02
    num_beside: int = 300
    beside_rounds: int = 10
    num_waiting: int = 200
    num_deaths: int = 5
    num_pending: int = 64
    num_tiny: int = 100_000
    tiny_chunk: int = 2000

    def __post_init__(self) -> None:
        for name in ("workers", "in_flight"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigurationError(f"{flag} needs positive numbers, for example 1,8")

    @classmethod
    def quick(cls) -> DispatchWorkload:
        """A tenth of it."""
        return cls(
            payloads=payloads(200, 100, 20),
            repeats=2,
            num_steps=25,
            beside_rounds=3,
            num_deaths=2,
            num_tiny=10_000,
            tiny_chunk=1000,
        )
