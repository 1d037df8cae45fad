"""The commands that ask a server over HTTP, as anyone may: `chat`, `top` and `bench`."""

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from worker.errors import UserError

DEFAULT_URL = "http://127.0.0.1:8000"
Urls = Callable[[], list[str]]


def add_to(commands: Any, running: Urls) -> None:
    """Add them to the subparsers of argparse. `running`: URLs of what this machine serves."""
    chat = commands.add_parser(
        "chat", allow_abbrev=False, help="talk to a server; reads standard input"
    )
    chat.add_argument("message", nargs="?", default="", help="ask this only")
    _add_server(chat, running)
    chat.add_argument("--model", metavar="NAME", help="default: the first it serves")
    chat.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="of an answer")
    chat.add_argument("--temperature", type=float, metavar="T")
    chat.set_defaults(command=_chat)

    top = commands.add_parser(
        "top", allow_abbrev=False, help="show workers, load and latencies, as they change"
    )
    _add_server(top, running)
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="default: 1")
    top.add_argument(
        "--once", action="store_true", help="print once, as where there is no terminal"
    )
    top.add_argument("--json", action="store_true", help="print JSON, once")
    top.set_defaults(command=_top)

    commands.add_parser("bench", help="measure a server under load; see bench --help")


def bench(argv: Sequence[str]) -> int:
    """The load harness, as `python -m benchmarks.load`: its client processes import that again."""
    for package in ("benchmarks", "aiohttp"):
        if find_spec(package) is None and not {"-h", "--help"} & {*argv}:
            raise UserError(f"bench needs {package}: pip install 'kvlane[bench]'")
    sys.argv[1:] = argv
    try:
        runpy.run_module("benchmarks.load", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def _add_server(parser: argparse.ArgumentParser, running: Urls) -> None:
    parser.set_defaults(running=running)
    parser.add_argument("--url", default="", help="default: of the serve of this machine")
    parser.add_argument("--api-key-file", default="", metavar="PATH", help="its first key is sent")


def _address(args: argparse.Namespace) -> tuple[str, str]:
    """URL and key, both such that a request can be made of them."""
    import httpx

    from router.http.keys import read_keys

    url = args.url or [*args.running(), DEFAULT_URL][0]
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"--url {url}: {error}") from error
    try:
        known = sorted(read_keys(args.api_key_file), key=lambda key: not key.admin)
        keys = [key.secret for key in known[:1]]  # one that opens operators' pages, if any does
        return url, b"".join(keys).decode("ascii")
    except UnicodeDecodeError as error:
        raise UserError(f"{args.api_key_file}: the first key is not ASCII") from error


def _chat(args: argparse.Namespace) -> int:
    from cluster.clients import chat
    from cluster.clients.server import Server

    fields = {name: getattr(args, name) for name in ("model", "max_tokens", "temperature")}
    given = {name: value for name, value in fields.items() if value not in (None, "")}
    with Server(*_address(args), chat.TIMEOUT) as server:
        chat.converse(server, given, args.system, args.message)
    return 0


def _top(args: argparse.Namespace) -> int:
    from cluster.clients import top
    from cluster.clients.server import Server

    with Server(*_address(args), top.TIMEOUT) as server:
        top.show(server, args.interval, once=args.once, as_json=args.json)
    return 0
