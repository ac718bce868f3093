"""The gateway's Prometheus metrics, made at each scrape from what the pool and the HTTP side count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from phalanx.gateway.http import statistics
from phalanx.gateway.http.statistics import HttpStatistics
from phalanx.gateway.pool import Pool
from phalanx.gateway.roles.inference_gateway import InferenceGateway
from phalanx.gateway.roles.metrics import role_metrics
from phalanx.gateway.traffic import BOUNDS_S, Quantiles, ServerTraffic, buckets
from phalanx.routing.snapshot import Server, ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "phalanx_gateway_"
OF_SERVER = ("model", "server")


class GatewayMetrics(Collector):
    """In a registry of its own. Nothing is counted here, so that a request pays for nothing twice."""

    def __init__(
        self, pool: Pool, http: HttpStatistics, roles: Iterable[InferenceGateway] = ()
    ) -> None:
        self._roles = roles
        self._pool = pool
        self._http = http
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        servers = self._pool.snapshot.servers
        traffic = {server.server_id: self._pool.traffic.of(server.server_id) for server in servers}
        yield from self._of_servers(servers, traffic)
        yield from _times(servers, traffic)
        yield from role_metrics(self._roles)
        yield from self._of_http()
        yield GaugeMetricFamily(
            PREFIX + "pool_revision", "Changes of the pool.", self._pool.snapshot.revision
        )

    def _of_servers(
        self, servers: Sequence[Server], traffic: Mapping[str, ServerTraffic]
    ) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            PREFIX + "requests", "Requests that left a server.", labels=(*OF_SERVER, "code")
        )
        in_flight = GaugeMetricFamily(
            PREFIX + "in_flight_requests", "Requests at a server now.", labels=OF_SERVER
        )
        states = GaugeMetricFamily(
            PREFIX + "server_state", "1 for the state a server is in.", labels=(*OF_SERVER, "state")
        )
        for server in servers:
            labels = _labels(server)
            for code, num in traffic[server.server_id].codes.items():
                requests.add_metric([*labels, code], num)
            in_flight.add_metric(labels, self._pool.registry.load.count(server.server_id))
            for state in ServerState:
                states.add_metric([*labels, str(state)], int(server.state is state))
        yield from (requests, in_flight, states)

    def _of_http(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            PREFIX + "http_requests", "HTTP requests answered.", labels=("route", "status")
        )
        durations = HistogramMetricFamily(
            PREFIX + "http_request_seconds", "Head read to last byte written.", labels=("route",)
        )
        for route, counts in self._http.counts().items():
            for status, num in counts.by_status.items():
                requests.add_metric([route, str(status)], num)
            durations.add_metric(
                [route], buckets(statistics.BOUNDS_S, counts.buckets), counts.seconds
            )
        yield from (requests, durations)
        yield GaugeMetricFamily(
            PREFIX + "http_connections", "Open HTTP connections.", self._http.num_connections
        )


def _times(servers: Sequence[Server], traffic: Mapping[str, ServerTraffic]) -> Iterator[Metric]:
    latency = HistogramMetricFamily(
        PREFIX + "request_seconds", "From the choice of a server to the end.", labels=OF_SERVER
    )
    queue = HistogramMetricFamily(
        PREFIX + "queue_seconds", "The part of it in which no model worked.", labels=OF_SERVER
    )
    latest = GaugeMetricFamily(
        PREFIX + "request_quantile_seconds",
        "request_seconds of the latest requests.",
        labels=(*OF_SERVER, "quantile"),
    )
    latest_queue = GaugeMetricFamily(
        PREFIX + "queue_quantile_seconds",
        "queue_seconds of the latest requests.",
        labels=(*OF_SERVER, "quantile"),
    )
    for server in servers:
        labels, seen = _labels(server), traffic[server.server_id]
        for family, times in ((latency, seen.latency_histogram), (queue, seen.queue_histogram)):
            family.add_metric(labels, buckets(BOUNDS_S, times.counts), times.seconds)
        for gauge, quantiles in ((latest, seen.latency), (latest_queue, seen.queue)):
            for quantile, seconds in _seconds(quantiles):
                gauge.add_metric([*labels, quantile], seconds)
    yield from (latency, queue, latest, latest_queue)


def _labels(server: Server) -> list[str]:
    return [server.model_name, str(server.endpoint)]


def _seconds(quantiles: Quantiles) -> Iterable[tuple[str, float]]:
    for name, value in (("0.5", quantiles.p50), ("0.95", quantiles.p95), ("0.99", quantiles.p99)):
        if value is not None:
            yield name, value / 1000
