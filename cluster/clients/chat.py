"""`kvlane chat`: talk to any server that speaks OpenAI's chat completions."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from cluster.clients.server import Server
from worker.errors import KvlaneError, UserError, WorldError

TIMEOUT = httpx.Timeout(10.0, read=None)
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def converse(server: Server, fields: dict[str, Any], system: str, message: str) -> None:
    """Ask once, or until the end of the input where it is a terminal.

    fields: of every request; without a model: the first that the server lists.
    message: what to ask; "": standard input, line by line from a terminal, else all of it.

    Raises UserError if the server refuses the only question, WorldError if it does not answer or
    breaks off.
    """
    history = [{"role": "system", "content": system}] if system else []
    body = {"model": _first_model(server), **fields} if "model" not in fields else fields
    if message or not sys.stdin.isatty():
        history.append({"role": "user", "content": message or sys.stdin.read()})
        _answer(server, {**body, "messages": history})
        return
    with contextlib.suppress(ImportError):
        import readline as readline  # input() then edits lines and remembers them
    print(f"{body['model']} at {server.url}. Ctrl-C cuts an answer, Ctrl-D ends.")
    for line in _lines():
        history.append({"role": "user", "content": line})
        try:
            answer = _answer(server, {**body, "messages": history})
        except KvlaneError as error:
            print(f"error: {error}", file=sys.stderr)
            history.pop()
        else:
            history.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip():
            yield line


def _first_model(server: Server) -> str:
    with server.answering():
        listed = server.get("/v1/models")
    if not listed.is_success:
        raise _refusal(listed)
    try:
        return str(listed.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise WorldError(f"{server.url} does not answer as OpenAI's API: {error!r}") from error


def _answer(server: Server, body: dict[str, Any]) -> str:
    """Print the answer as it comes; its text. Ctrl-C cuts it short."""
    texts: list[str] = []
    try:
        for delta in _deltas(server, body):
            text, thought = delta.get("content"), delta.get("reasoning_content")
            if thought and sys.stdout.isatty():
                print(f"{DIM}{thought}{PLAIN}", end="", flush=True)
            if text:
                texts.append(text)
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    print()
    return "".join(texts)


def _deltas(server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    body = {**body, "stream": True}
    url = "/v1/chat/completions"
    with server.answering(), server.stream("POST", url, json=body) as answer:
        if not answer.is_success:
            answer.read()
            raise _refusal(answer)
        for line in answer.iter_lines():
            event = line.removeprefix("data:").strip()
            if line.startswith("data:") and event != "[DONE]":
                yield from _chunk(server, event)


def _chunk(server: Server, text: str) -> list[dict[str, Any]]:
    try:
        event: dict[str, Any] = json.loads(text)
        error: str = event["error"]["message"] if "error" in event else ""
        deltas = [{**choice["delta"]} for choice in event.get("choices", ())]
    except (ValueError, LookupError, TypeError, AttributeError) as wrong:
        raise WorldError(f"{server.url} sent no chunk of a chat: {text[:200]}") from wrong
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
