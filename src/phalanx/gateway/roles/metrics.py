"""Prometheus' metrics of roles, made at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from phalanx.gateway.roles.board import in_flight_of
from phalanx.gateway.roles.inference_gateway import InferenceGateway
from phalanx.gateway.traffic import BOUNDS_S, buckets
from phalanx.routing.roles.snapshot import ReplicaState

PREFIX = "phalanx_gateway_role_"
OF_ENGINE = ("role", "model", "engine")


def role_metrics(roles: Iterable[InferenceGateway]) -> Iterator[Metric]:
    """A model's router counts as the engine `MODEL/router`."""
    requests = CounterMetricFamily(
        PREFIX + "requests", "Requests that left an engine.", labels=(*OF_ENGINE, "code")
    )
    in_flight = GaugeMetricFamily(
        PREFIX + "in_flight_requests", "Requests at an engine now.", labels=OF_ENGINE
    )
    times = HistogramMetricFamily(
        PREFIX + "request_seconds", "From the choice of an engine to the end.", labels=OF_ENGINE
    )
    states = GaugeMetricFamily(
        PREFIX + "engine_state", "1 for the state an engine is in.", labels=(*OF_ENGINE, "state")
    )
    revisions = GaugeMetricFamily(
        PREFIX + "topology_revision", "Of the role's newest snapshot.", labels=("role",)
    )
    followed = GaugeMetricFamily(
        PREFIX + "manager_heard", "Whether its manager is heard.", labels=("role",)
    )
    for role in roles:
        snapshot = role.source.snapshot
        revisions.add_metric([role.role], snapshot.revision)
        followed.add_metric([role.role], int(not role.lost()))
        for model in snapshot.content.models:
            for engine_id, num in in_flight_of(role, model).items():
                labels = [role.role, model.name, engine_id]
                in_flight.add_metric(labels, num)
                traffic = role.servers.traffic.of(engine_id)
                for code, count in traffic.codes.items():
                    requests.add_metric([*labels, code], count)
                latency = traffic.latency_histogram
                times.add_metric(labels, buckets(BOUNDS_S, latency.counts), latency.seconds)
            for replica in model.replicas:
                labels = [role.role, model.name, replica.engine_id]
                for state in ReplicaState:
                    states.add_metric([*labels, str(state)], int(replica.state is state))
    yield from (requests, in_flight, times, states, revisions, followed)
