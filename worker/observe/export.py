"""Where the spans of one process go: OpenTelemetry's SDK, which sends them from its own thread.

The SDK reads the variables OTEL_* itself; what the configuration says wins.
"""

import logging
import socket
import threading
import time
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from worker.config import TracingConfig
from worker.observe.spans import Tracer

log = logging.getLogger("kvlane.tracing")

FLUSH_S = 1.0  # for the last spans to leave when the process ends
TELL_S = 60.0  # between two lines about a collector that does not answer
TRACES_PATH = "/v1/traces"
# Loggers whose complaints are about spans on their way out; the last two queue them.
EXPORTING = (
    "opentelemetry.exporter.",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk._shared_internal",
)


def exporting(config: TracingConfig, role: str, name: str) -> Tracer:
    """A tracer whose spans go to the collector."""
    _quiet_sdk()
    ours = {
        "service.name": f"kvlane-{role}",
        "service.instance.id": name,
        "host.name": socket.gethostname(),
    }
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    ratio = config.sample_ratio
    sampler = None if ratio == "auto" else ParentBased(TraceIdRatioBased(ratio))
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=_url(config.endpoint))
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def close() -> None:
        flushing = threading.Thread(target=provider.shutdown, name="kvlane-spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        if flushing.is_alive():
            exporter.shutdown()  # ends its retries
            log.warning("the last spans could not be sent within %g s", FLUSH_S)

    return Tracer(provider.get_tracer("kvlane"), close)


def _url(endpoint: str) -> str | None:
    if endpoint == "auto":
        return None
    parts = urlsplit(endpoint)
    path = parts.path.rstrip("/")
    if not path.endswith(TRACES_PATH):
        path += TRACES_PATH
    return parts._replace(path=path).geturl()


class _Complaints(logging.Handler):
    """Passes the SDK's complaints on to our log, without stack traces.

    One every TELL_S of a logger; all loggers that export spans count as one.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next_at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        subject = "spans may be lost" if record.name.startswith(EXPORTING) else record.name
        now = time.monotonic()
        if now >= self._next_at.get(subject, 0.0):
            self._next_at[subject] = now + TELL_S
            log.warning("%s: %s", subject, " ".join(record.getMessage().split()))


def _quiet_sdk() -> None:
    """Else a collector that is down is a line or a stack trace for every batch."""
    sdk = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _Complaints) for handler in sdk.handlers):
        sdk.addHandler(_Complaints())
        sdk.propagate = False
