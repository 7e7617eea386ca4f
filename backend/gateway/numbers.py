"""The gateway's own counters, for Prometheus. No label has more values than this file names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Numbers:
    """One registry for each application object, so that two in one process do not meet."""

    def __init__(self, gateway: str) -> None:
        self._registry = CollectorRegistry()
        self._gateway = gateway
        self.devices = self._gauge("tileweave_devices_online", "Devices connected to this gateway")
        self.slots = self._gauge("tileweave_slot_bytes", "Upload slots in use, in bytes")
        self.results = self._counter("tileweave_results", "Complete results received")
        self.requests = self._counter("tileweave_requests", "HTTP requests answered", ("status",))
        traffic = self._counter("tileweave_device_bytes", "Bytes of frames on device sockets", ("direction",))
        self.device_bytes = {direction: traffic.labels(direction) for direction in ("in", "out")}
        # Named here, so that the exposition has the same size from the first scrape on.
        self.request_counts = {status: self.requests.labels(status) for status in ("2xx", "3xx", "4xx", "5xx")}

    def exposition(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(name, text, ("gateway",), registry=self._registry)
        return gauge.labels(self._gateway)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, registry=self._registry)
