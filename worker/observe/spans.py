"""Spans of one process, from time stamps that its loop takes anyway; and where they go.

A span's times are monotonic seconds of its own process. No clock of one process is compared with
another's: only trace and span ids travel. OpenTelemetry's SDK sends spans from its own thread. It
reads the variables OTEL_* itself; the configuration wins.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from worker.config import TracingConfig

log = logging.getLogger("kvlane.tracing")

Attributes = Mapping[str, AttributeValue]

W3C = TraceContextTextMapPropagator()
PARENT_CHARS = 55  # of a traceparent; the rest of `Trace.carried` is the tracestate
STEP_NS = 1_000_000  # a clock that was set by less is not noticed
RETRIED = ("prefill", "dispatch")  # stages that are entered again where they fail
ABORT = "abort"  # as FinishReason.ABORT: nobody wants the rest, which is no error
NO_ATTRIBUTES: Attributes = {}
FLUSH_S = 1.0  # for the last spans to leave when the process ends
TELL_S = 60.0  # between two lines about a collector that does not answer
TRACES_PATH = "/v1/traces"
# Loggers whose complaints are about spans on their way out; the last two queue them.
EXPORTING = (
    "opentelemetry.exporter.",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk._shared_internal",
)


class Tracer:
    """Makes the traces of one process; from one thread.

    The difference of wall clock and monotonic clock is kept until one of them is set: so a
    request's spans fit together to a microsecond on a machine. `close` sends the rest, in bounds.
    """

    def __init__(self, tracer: otel.Tracer, close: Callable[[], None]) -> None:
        self.spans = tracer
        self._offset_ns = _offset_ns()
        self.close = close

    def of_headers(self, headers: Mapping[str, str], at: float) -> "Trace":
        """The trace that a request's W3C headers name, or a new one, from `at` on."""
        # Not the current context: whatever instruments this process, our parents are explicit.
        return Trace(self, W3C.extract(headers, Context()), at, serves=True)

    def carried(self, text: str, at: float) -> "Trace":
        """The trace that a message brought (`Trace.carried`); at: when its first stage begins."""
        parent = {"traceparent": text[:PARENT_CHARS], "tracestate": text[PARENT_CHARS:]}
        return self.of_headers(parent, at)

    def wall_ns(self, at: float) -> int:
        """The wall clock's reading at a monotonic time, in ns since the epoch."""
        if abs(time.time_ns() - time.monotonic_ns() - self._offset_ns) > STEP_NS:
            self._offset_ns = _offset_ns()
        return int(at * 1e9) + self._offset_ns


@dataclass(slots=True, eq=False)
class Trace:
    """Stages of a request in one process: a stage begins where the one before it has ended.

    So they add up. Calls in the wrong order, as of a request that ends early, do no harm.
    Service graphs pair CLIENT spans with their SERVER children: of those a process has one, the
    first stage that asks nobody, if another process is the parent (`serves`).
    """

    tracer: Tracer
    parent: Context
    at: float  # up to when stages have ended
    attributes: Attributes = field(default_factory=dict[str, AttributeValue])  # of every stage
    serves: bool = False  # and no stage is SERVER yet
    inner: "Trace | None" = None  # stages within the present one, which end with it
    _span: Span | None = None  # of the present stage
    _attempts: int = 0
    _cause: str = ""  # of the next attempt: why a stage failed

    @property
    def is_recorded(self) -> bool:
        """Whether the present stage will be exported."""
        return self._span is not None and self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """In hexadecimal, as in a traceparent."""
        assert self._span is not None
        return otel.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def carried(self) -> str:
        """The present stage as the parent of another process's stages, for a message."""
        assert self._span is not None
        headers: dict[str, str] = {}
        W3C.inject(headers, otel.set_span_in_context(self._span, Context()))
        return headers.get("traceparent", "") + headers.get("tracestate", "")

    def enter(
        self, stage: str, at: float, attributes: Attributes = NO_ATTRIBUTES, *, asks: bool = False
    ) -> None:
        """Begin a stage; the present one ends at `at`. asks: it waits for another process.

        One of RETRIED says which attempt it is, and which error has ended the one before.
        """
        self.leave(at)
        all_of_it = {**self.attributes, **attributes}
        if stage in RETRIED:
            self._attempts += 1
            all_of_it["kvlane.attempt"] = self._attempts
            if self._cause:
                all_of_it["kvlane.cause"], self._cause = self._cause, ""
        kind = SpanKind.CLIENT if asks else SpanKind.INTERNAL
        if self.serves and not asks:
            kind, self.serves = SpanKind.SERVER, False
        self._span = self.tracer.spans.start_span(  # recorded only if the sampler says so
            stage, self.parent, kind, all_of_it, start_time=self.tracer.wall_ns(self.at)
        )

    def note(self, attributes: Attributes) -> None:
        """Add to the present stage."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def leave(
        self,
        at: float,
        attributes: Attributes = NO_ATTRIBUTES,
        error: str = "",
        why: str | None = None,
    ) -> None:
        """End the present stage, if there is one.

        error: code of the error that has cut it off, or ABORT; why: the error in words.
        """
        span = self._span
        if span is None:
            return
        if self.inner is not None:
            self.inner.leave(at, error=error)
            self.inner = None
        if attributes:
            span.set_attributes(attributes)
        if error:
            self._cause = error
            span.set_attribute("error.type", error)
            if error != ABORT:
                span.set_status(Status(StatusCode.ERROR, why or error))
        self.at = max(at, self.at)
        span.end(self.tracer.wall_ns(self.at))
        self._span = None

    def below(self, at: float, attributes: Attributes = NO_ATTRIBUTES) -> "Trace":
        """Stages within the present one, from `at` on."""
        assert self._span is not None
        parent = otel.set_span_in_context(self._span, Context())
        return Trace(self.tracer, parent, at, attributes)

    def add(self, stage: str, began_at: float, at: float, attributes: Attributes) -> None:
        """A stage that is over already; the present one has ended when it began."""
        self.leave(began_at)
        self.at = max(began_at, self.at)
        self.enter(stage, at, attributes)
        self.leave(at)


def _offset_ns() -> int:
    """Between the clocks, by the quickest of some readings."""
    readings: list[tuple[int, int]] = []
    for _ in range(9):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


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
