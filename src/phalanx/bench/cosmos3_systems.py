"""The systems that the benchmark of Cosmos3 knows."""

from __future__ import annotations

from phalanx.bench.systems import BenchmarkedSystem

PHALANX = BenchmarkedSystem("phalanx", "cosmos3_phalanx_worker.py", "phalanx")
TWO_RANKS = BenchmarkedSystem("phalanx-cfg2", "cosmos3_phalanx_worker.py", "phalanx")
"""Two processes, of which each computes one branch of guidance."""

PEERS = {
    "diffusers": BenchmarkedSystem(
        "diffusers",
        "cosmos3_diffusers_worker.py",
        "diffusers",
        environment=".venv-diffusers",
        install=("python scripts/peer_env.py diffusers",),
    )
}
