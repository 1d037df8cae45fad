"""`kvlane chat`: talk to any server that speaks OpenAI's chat completions."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from worker.errors import KvlaneError, UserError, WorldError

CONNECT_TIMEOUT_S = 10.0
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to ask, and how.

    Args:
        url: with or without /v1.
        key: bearer key; "": none.
        options: further fields of every request.
    """

    url: str
    key: str
    options: dict[str, Any]

    def client(self) -> httpx.Client:
        """For all requests of a conversation."""
        return httpx.Client(
            base_url=self.url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=httpx.Timeout(CONNECT_TIMEOUT_S, read=None),
        )


def converse(server: Server, model: str, system: str, message: str) -> None:
    """Ask once, or until the end of the input where it is a terminal.

    Args:
        server: whom to ask.
        model: "" = the first that it lists.
        system: the system prompt; "" = none.
        message: what to ask; "" = standard input, line by line from a terminal, else all of it.

    Raises:
        UserError: the server refuses the only question.
        WorldError: it does not answer, or breaks off.
    """
    history = [{"role": "system", "content": system}] if system else []
    with server.client() as client:
        body = {**server.options, "model": model or _first_model(client)}
        if message or not sys.stdin.isatty():
            history.append({"role": "user", "content": message or sys.stdin.read()})
            _answer(client, {**body, "messages": history})
            return
        with contextlib.suppress(ImportError):
            import readline as readline  # input() then edits lines and remembers them
        print(f"{body['model']} at {client.base_url}. Ctrl-C cuts an answer, Ctrl-D ends.")
        for line in _lines():
            history.append({"role": "user", "content": line})
            try:
                said = _answer(client, {**body, "messages": history})
            except KvlaneError as error:
                print(f"error: {error}", file=sys.stderr)
                history.pop()
            else:
                history.append({"role": "assistant", "content": said})


def _lines() -> Iterator[str]:
    """What is typed, until Ctrl-D or Ctrl-C at the prompt."""
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip():
            yield line


def _first_model(client: httpx.Client) -> str:
    try:
        listed = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise _silent(client, error) from error
    if not listed.is_success:
        raise _refusal(listed)
    try:
        return str(listed.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise WorldError(f"{client.base_url} does not answer as OpenAI's API: {error!r}") from error


def _answer(client: httpx.Client, body: dict[str, Any]) -> str:
    """Print the answer as it comes; what was said. Ctrl-C cuts it short."""
    said: list[str] = []
    is_terminal = sys.stdout.isatty()
    try:
        for delta in _deltas(client, body):
            text, thought = delta.get("content"), delta.get("reasoning_content")
            if thought and is_terminal:
                print(f"{DIM}{thought}{PLAIN}", end="", flush=True)
            if text:
                said.append(text)
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    print()
    return "".join(said)


def _deltas(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as got:
            if not got.is_success:
                got.read()
                raise _refusal(got)
            for line in got.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                yield from _chunk(client, data)
    except httpx.HTTPError as error:
        raise _silent(client, error) from error


def _chunk(client: httpx.Client, data: str) -> list[dict[str, Any]]:
    """The deltas of one event."""
    try:
        event: dict[str, Any] = json.loads(data)
        error: str = event["error"]["message"] if "error" in event else ""
        deltas = [{**choice["delta"]} for choice in event.get("choices", ())]
    except (ValueError, LookupError, TypeError, AttributeError) as wrong:
        raise WorldError(f"{client.base_url} sent no chunk of a chat: {data[:200]}") from wrong
    if error:
        raise WorldError(f"the answer broke off: {error}")
    return deltas


def _refusal(response: httpx.Response) -> KvlaneError:
    """OpenAI's error body, or whatever there is."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    cause = UserError if response.is_client_error else WorldError
    return cause(f"{response.status_code}: {message}")


def _silent(client: httpx.Client, error: httpx.HTTPError) -> WorldError:
    return WorldError(
        f"no answer from {client.base_url}: {error}; `kvlane serve` starts a server, --url names "
        "another"
    )
