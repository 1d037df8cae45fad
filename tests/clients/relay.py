"""A relay that keeps what passes: requests to a server, and its answers as they stream back."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OF_A_HOP = {"accept-encoding", "connection", "content-length", "host", "transfer-encoding"}


@dataclass(slots=True)
class Exchange:
    """One request and its answer; status 0: none has come."""

    path: str
    asked: bytes
    status: int = 0
    answer: str = ""


@contextmanager
def relay(port: int, kept: list[Exchange]) -> Iterator[str]:
    """The URL of a relay to `port` of this machine; `kept` gets what passes, in order."""

    class Passing(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            kept.append(exchange := Exchange(self.path, body))
            headers = {k: v for k, v in self.headers.items() if k.lower() not in OF_A_HOP}
            server = http.client.HTTPConnection("127.0.0.1", port)
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            exchange.status = answer.status
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in OF_A_HOP:
                    self.send_header(name, value)
            self.end_headers()
            while part := answer.read1():
                exchange.answer += part.decode(errors="replace")
                self.wfile.write(part)
            server.close()

        do_GET = do_HEAD = do_POST = pass_on

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Passing) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
