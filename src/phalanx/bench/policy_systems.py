"""The systems that the policy benchmark knows."""

from __future__ import annotations

from phalanx.bench.systems import BenchmarkedSystem

PHALANX = BenchmarkedSystem("phalanx", "policy_phalanx_worker.py", "phalanx")

PEERS = {
    "lerobot": BenchmarkedSystem(
        "lerobot",
        "policy_lerobot_worker.py",
        "lerobot",
        environment=".venv-lerobot-policy",
        install=("python scripts/peer_env.py lerobot-policy",),
    )
}
