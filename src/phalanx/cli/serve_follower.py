"""`phalanx serve` on a machine of a replica that is not its first one: no port answers requests."""

from __future__ import annotations

import signal

from phalanx.engine.deployments.spanning import NodeFollower
from phalanx.engine_config import EngineArgs
from phalanx.schema.deployment import DeploymentConfig

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_follower(args: EngineArgs, deployment: DeploymentConfig) -> int:
    """Follow the head until it closes, or a signal comes; the exit status."""
    follower = NodeFollower(args, deployment)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda *_: follower.stop())
    process = deployment.supervision
    try:
        follower.run(
            lambda: print(
                f"phalanx: machine {process.node_rank} of {process.num_nodes} of {args.plugin}",
                flush=True,
            )
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
