"""A model hub on localhost: what huggingface_hub asks of one to download a snapshot."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True)
class Repo:
    directory: Path
    token: str = ""  # that a request needs; "": it is public
    gated: bool = False


@dataclass(slots=True)
class Hub:
    repos: dict[str, Repo]
    url: str = ""
    cut_after: int = 0  # bytes of "more.safetensors", after which the connection breaks, once
    asked: list[str] = field(default_factory=list)  # METHOD path [range]

    def downloads(self) -> list[str]:
        """The files that were read, with the ranges that were asked for."""
        return [each.split("/", 5)[-1] for each in self.asked if each.startswith("GET /") and
                "/resolve/" in each]  # fmt: skip


@contextmanager
def running(**repos: Repo) -> Iterator[Hub]:
    """A hub with these models, `org__name` for org/name."""
    hub = Hub({name.replace("__", "/").replace("_", "-"): repo for name, repo in repos.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        span = self.headers.get("Range", "")
        self.hub.asked.append(f"{self.command} {path} {span}".strip())
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        name, revision = (api[1], api[3]) if api else (file[1], file[2]) if file else ("", "")
        repo = self.hub.repos.get(name)
        bearer = self.headers.get("Authorization", "")
        if repo is None or (repo.token and bearer != f"Bearer {repo.token}" and not repo.gated):
            # The hub does not tell a stranger whether a private model exists.
            self._refuse(404 if bearer else 401, "RepoNotFound", "Repository Not Found")
        elif repo.gated:
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
        elif revision not in (None, "main", COMMIT):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif api:
            self._describe(name, repo, tree=api[2] == "tree")
        else:
            assert file is not None
            self._send_file(repo.directory / file[3], span)

    def _describe(self, name: str, repo: Repo, *, tree: bool) -> None:
        files = sorted(path for path in repo.directory.rglob("*") if path.is_file())
        names = {str(path.relative_to(repo.directory)): path.stat().st_size for path in files}
        rows = [
            {"type": "file", "path": path, "size": size, "oid": _etag(repo.directory / path)}
            for path, size in names.items()
        ]
        siblings = [{"rfilename": path, "size": size} for path, size in names.items()]
        about = {"id": name, "modelId": name, "sha": COMMIT, "tags": [], "siblings": siblings}
        self._send_json(200, rows if tree else about)

    def _send_file(self, path: Path, span: str) -> None:
        if not path.is_file():
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        data = path.read_bytes()
        start = int(span.removeprefix("bytes=").rstrip("-")) if span else 0
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if span:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._head(206 if span else 200, headers, len(data) - start)
        if self.hub.cut_after and path.name == "more.safetensors" and self.command == "GET":
            self._write(data[start : start + self.hub.cut_after])
            self.hub.cut_after = 0
            self.close_connection = True
            return
        self._write(data[start:])

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send_json(status, {"error": message}, headers)

    def _send_json(self, status: int, answer: object, more: dict[str, str] | None = None) -> None:
        body = json.dumps(answer).encode()
        self._head(status, {"Content-Type": "application/json"} | (more or {}), len(body))
        self._write(body)

    def _head(self, status: int, headers: dict[str, str], num_bytes: int) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(num_bytes))
        self.end_headers()

    def _write(self, data: bytes) -> None:
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(path: Path) -> str:
    """As git names a file's content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
