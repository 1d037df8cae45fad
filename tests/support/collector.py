"""A collector of spans: OTLP over HTTP, parsed as OpenTelemetry's own messages."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.support.patience import HANG_S


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "" = none
    began_ns: int
    ended_ns: int
    service: str
    instance: str  # name of the process
    is_client: bool
    is_server: bool
    is_error: bool
    attributes: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


@dataclass
class Collector:
    server: ThreadingHTTPServer
    spans: list[Span] = field(default_factory=list[Span])
    paths: set[str] = field(default_factory=set[str])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        """Answer nobody any more; a second call does nothing."""
        self.server.shutdown()
        self.server.server_close()

    def of(self, trace_id: str) -> list[Span]:
        """The spans of a trace, by their beginning."""
        return sorted(
            (span for span in self.spans if span.trace_id == trace_id),
            key=lambda span: (span.began_ns, -span.ended_ns),
        )

    def wait(
        self, trace_id: str, complete: Callable[[Sequence[Span]], bool], timeout_s: float = HANG_S
    ) -> list[Span]:
        """The spans of a trace once all have come that are asked for."""
        deadline = time.monotonic() + timeout_s
        while not complete(found := self.of(trace_id)):
            names = [span.name for span in found]
            assert time.monotonic() < deadline, f"of {trace_id} only {names} came"
            time.sleep(0.05)
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.paths.add(self.path)
            collector.spans += spans_of(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(server)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.close()
        thread.join()


def spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for of_process in request.resource_spans:
        resource = {each.key: value_of(each.value) for each in of_process.resource.attributes}
        for of_library in of_process.scope_spans:
            for each in of_library.spans:
                yield Span(
                    name=each.name,
                    trace_id=each.trace_id.hex(),
                    span_id=each.span_id.hex(),
                    parent_id=each.parent_span_id.hex(),
                    began_ns=each.start_time_unix_nano,
                    ended_ns=each.end_time_unix_nano,
                    service=resource["service.name"],
                    instance=resource["service.instance.id"],
                    is_client=each.kind == Sent.SPAN_KIND_CLIENT,
                    is_server=each.kind == Sent.SPAN_KIND_SERVER,
                    is_error=each.status.code == Status.STATUS_CODE_ERROR,
                    attributes={pair.key: value_of(pair.value) for pair in each.attributes},
                )


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind)
