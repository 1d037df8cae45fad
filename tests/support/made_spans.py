"""A tracer whose spans stay in this process."""

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from worker.observe.spans import Tracer


class Made:
    def __init__(self) -> None:
        provider, self._exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(provider.get_tracer("test"), provider.shutdown)

    def spans(self) -> list[tuple[str, int, int]]:
        """(name, begin, end) in ms since the first began."""
        found = self.raw()
        first = min((span.start_time or 0 for span in found), default=0)
        return [
            (span.name, round((span.start_time or 0) - first) // 1_000_000,
             round((span.end_time or 0) - first) // 1_000_000) for span in found
        ]  # fmt: skip

    def raw(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()
