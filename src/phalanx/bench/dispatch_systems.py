"""The systems that the dispatch benchmark knows."""

from __future__ import annotations

from phalanx.bench.systems import BenchmarkedSystem

PHALANX = BenchmarkedSystem("phalanx", "dispatch_phalanx_worker.py", "phalanx")
REPLICAS = BenchmarkedSystem("phalanx", "dispatch_replicas_worker.py", "phalanx")
FLOOR = BenchmarkedSystem("floor", "dispatch_floor_worker.py", "phalanx")

PEERS = {
    system.name: system
    for system in (
        BenchmarkedSystem("queue", "dispatch_queue_worker.py", "numpy"),
        BenchmarkedSystem("pool", "dispatch_pool_worker.py", "numpy"),
        BenchmarkedSystem(
            "zmq",
            "dispatch_zmq_worker.py",
            "zmq",
            environment=".venv-zmq",
            install=(
                "python3 -m venv .venv-zmq",
                ".venv-zmq/bin/pip install pyzmq msgpack numpy",
            ),
        ),
        BenchmarkedSystem(
            "ray",
            "dispatch_ray_worker.py",
            "ray",
            environment=".venv-ray",
            install=("python3 -m venv .venv-ray", ".venv-ray/bin/pip install ray numpy"),
        ),
    )
}
