"""The phases of the gateway benchmark: requests through a proxy, and how it spreads them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from phalanx.bench.gateway_workload import GatewayWorkload, Traffic
from phalanx.bench.results import Measure, percentile
from phalanx.bench.turns import Asks
from phalanx.bench.worker_process import WorkerProcess


class _Ports(msgspec.Struct, frozen=True):
    port: int
    grpc_port: int


class _Times(msgspec.Struct, frozen=True):
    seconds: float
    times_s: list[float]


class _Shares(msgspec.Struct, frozen=True):
    shares: list[int]


class ProxyUnderLoad:
    """A proxy's process and the load's, asked as one: the load is told the proxy's port, and the
    processor time is the proxy's.
    """

    def __init__(self, proxy: WorkerProcess, load: WorkerProcess) -> None:
        self._proxy = proxy
        self._load = load
        self._ports = msgspec.convert(proxy.ask("port"), _Ports)

    def ask(self, kind: str, **message: object) -> dict[str, object]:
        port = self._ports.grpc_port if message.get("traffic") == "grpc" else self._ports.port
        return self._load.ask(kind, **{"port": port, **message})

    def cpu_s(self) -> float:
        return msgspec.convert(self._proxy.ask("cpu")["seconds"], float)


def key_of(traffic: str, value: str) -> str:
    return f"{traffic}_{value}"


class Through:
    """Requests of one kind. What a proxy adds is its median time less that of the same requests
    sent to a backend itself, in the same turn.
    """

    def __init__(self, traffic: Traffic, direct_port: int) -> None:
        self._traffic = traffic
        self._direct_port = direct_port
        label = f"{traffic.label}, "
        self.measures = (
            Measure(
                key=key_of(traffic.key, "cpu"),
                label=f"{label}processor time",
                unit="us/request",
                more_is_better=False,
            ),
            Measure(
                key=key_of(traffic.key, "added"),
                label=f"{label}added p50, 1 in flight",
                unit="us",
                more_is_better=False,
            ),
            Measure(
                key=key_of(traffic.key, "rate"),
                label=f"{label}{traffic.concurrency} in flight",
                unit="requests/s",
                plotted=False,
            ),
        )

    def warm_up(self, worker: Asks) -> None:
        """Also opens the connections that are kept."""
        traffic = self._traffic
        self._run(worker, 2 * traffic.concurrency, traffic.concurrency)

    def run(self, worker: Asks) -> Mapping[str, float]:
        traffic = self._traffic
        direct = self._run(worker, traffic.num_alone, 1, port=self._direct_port)
        alone = self._run(worker, traffic.num_alone, 1)
        before_s = worker.cpu_s()
        together = self._run(worker, traffic.num_together, traffic.concurrency)
        cpu_s = worker.cpu_s() - before_s
        added_s = percentile(alone.times_s, 0.5) - percentile(direct.times_s, 0.5)
        return {
            key_of(traffic.key, "cpu"): cpu_s / traffic.num_together * 1e6,
            key_of(traffic.key, "added"): added_s * 1e6,
            key_of(traffic.key, "rate"): traffic.num_together / together.seconds,
        }

    def _run(self, worker: Asks, count: int, concurrency: int, **port: int) -> _Times:
        answer = worker.ask(
            "run", traffic=self._traffic.key, count=count, concurrency=concurrency, **port
        )
        return msgspec.convert(answer, _Times)


SLOW_SHARE = Measure(
    key="slow_share",
    label="slow server beside a fast one",
    unit="of 200 requests",
    more_is_better=False,
    plotted=False,
)


class Balance:
    """How many of the requests a slow server gets that stands beside a fast one."""

    measures = (SLOW_SHARE,)

    def __init__(self, workload: GatewayWorkload) -> None:
        self._workload = workload

    def warm_up(self, worker: Asks) -> None:
        """Nothing: a time would tell of it, a count does not."""

    def run(self, worker: Asks) -> Mapping[str, float]:
        workload = self._workload
        answer = worker.ask(
            "shares",
            count=workload.num_balanced,
            concurrency=workload.balanced_in_flight,
            delays_s=list(workload.delays_s),
        )
        return {SLOW_SHARE.key: float(msgspec.convert(answer, _Shares).shares[0])}
