"""Work that keeps one thread busy: so many rounds of arithmetic, the same for everyone."""

from __future__ import annotations

import time

_TRIALS = 5


def burn(num_iterations: int) -> int:
    """Compute; what it returns means nothing."""
    value = 1
    for _ in range(num_iterations):
        value = (value * 75 + 74) % 65537
    return value


def iterations_for(seconds: float) -> int:
    """How many iterations take this long on this machine when nothing disturbs."""
    num_iterations, fastest_s = 1000, 0.0
    while fastest_s < seconds / 4:
        num_iterations *= 2
        fastest_s = min(_timed(num_iterations) for _ in range(_TRIALS))
    return max(1, round(num_iterations * seconds / fastest_s))


def _timed(num_iterations: int) -> float:
    began_s = time.perf_counter()
    burn(num_iterations)
    return time.perf_counter() - began_s
