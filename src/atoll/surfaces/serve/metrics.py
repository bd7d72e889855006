"""/metrics: what the server did and has, as Prometheus reads it.

Owns which metrics there are. Their labels are bounded: a request counts for its route, not for its path. They name
tenants, so they are for a key of the server itself. Used by `app.py`.
"""

from __future__ import annotations

import os
from collections import Counter as Tally
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from atoll.server.server import Server
from atoll.surfaces.door.connection import Door
from atoll.surfaces.door.middleware import DoneRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_EXECS = ("exec", "processes")


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self, server: Server, door: Door) -> None:
        self._server = server
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "atoll_requests", "Requests that were answered", ["method", "route", "status"], registry=self._registry
        )
        self._latency = Histogram(
            "atoll_request_seconds", "Until the end of an answer", ["route"], buckets=_BUCKETS, registry=self._registry
        )
        self._execs = Counter("atoll_execs", "Commands that were started", ["tenant"], registry=self._registry)
        self._sandboxes = Gauge("atoll_sandboxes", "Sandboxes", ["tenant", "status"], registry=self._registry)
        self._registry.register(_DoorMetrics(door))

    def count(self, done: DoneRequest) -> None:
        scope = done.scope
        route = getattr(scope.get("route"), "path", None) or scope["state"].get("mounted", "none")
        method = scope.get("method", "WEBSOCKET")
        self._requests.labels(method if method in _METHODS else "other", route, str(done.status)).inc()
        self._latency.labels(route).observe(done.seconds)
        caller = scope["state"].get("caller")
        if caller is not None and method == "POST" and route.rpartition("/")[2] in _EXECS and done.status < 300:
            self._execs.labels(caller.tenant.name).inc()

    async def text(self) -> bytes:
        """The metrics now. Sandboxes are counted when they are asked for: what is on disk is the truth."""
        self._sandboxes.clear()
        for tenant, infos in (await self._server.list_sandboxes()).items():
            for status, count in Tally(info.status for info in infos).items():
                self._sandboxes.labels(tenant, status).set(count)
        return generate_latest(self._registry)


_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET"))


class _DoorMetrics(Collector):
    """What is known without being counted: connections, refusals and this process."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("atoll_connections", "Open connections", self._door.clients.total())
        refused = CounterMetricFamily("atoll_refused", "Refused before an app saw them", labels=["code"])
        for code, count in self._door.refused.items():
            refused.add_metric([code], count)
        yield refused
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        yield GaugeMetricFamily("atoll_memory_bytes", "Resident memory", pages * os.sysconf("SC_PAGESIZE"))
        yield GaugeMetricFamily("atoll_open_files", "Open descriptors", len(os.listdir("/proc/self/fd")))
