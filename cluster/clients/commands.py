"""The commands that ask a server over HTTP, as anyone may: `chat`, `top` and `bench`."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from cluster.clients.find import Urls, add_server, found, key_of, trusted
from worker.errors import UserError

OTHER_BENCHES = {"report", "selfcheck", "stub", "-h", "--help"}  # that ask no server


def add_to(commands: Any, running: Urls) -> None:
    """Add them to the subparsers of argparse. `running`: URLs of what this machine serves."""
    chat = commands.add_parser(
        "chat", allow_abbrev=False, help="talk to a server; reads standard input"
    )
    chat.add_argument("message", nargs="?", default="", help="ask this only")
    add_server(chat)
    chat.add_argument("--model", metavar="NAME", help="default: the first it serves")
    chat.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="of an answer")
    chat.add_argument("--temperature", type=float, metavar="T")
    chat.set_defaults(command=_chat, running=running)

    top = commands.add_parser(
        "top", allow_abbrev=False, help="show workers, load and latencies, as they change"
    )
    add_server(top)
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="default: 1")
    top.add_argument(
        "--once", action="store_true", help="print once, as where there is no terminal"
    )
    top.add_argument("--json", action="store_true", help="print JSON, once")
    top.set_defaults(command=_top, running=running)

    cache = commands.add_parser(
        "cache", allow_abbrev=False, help="show where prompts' KV was found, and what tiers keep"
    )
    add_server(cache)
    cache.add_argument("--forget", action="store_true", help="delete what no request uses")
    cache.set_defaults(command=_cache, running=running)

    commands.add_parser("bench", help="measure a server under load; see bench --help")


def bench(argv: Sequence[str], running: Urls = list) -> int:
    """The load harness, as `python -m benchmarks.load`: its client processes import that again."""
    if not OTHER_BENCHES & {*argv} and not any(word.startswith("--url") for word in argv):
        argv = [*argv, "--url", found("", running)]
    for package in ("benchmarks", "aiohttp"):
        if find_spec(package) is None and not {"-h", "--help"} & {*argv}:
            raise UserError(f"bench needs {package}: pip install 'kvlane[bench]'")
    sys.argv[1:] = argv
    try:
        runpy.run_module("benchmarks.load", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def _server(args: argparse.Namespace, timeout: Any) -> Any:
    """Whom to ask; raises UserError for what no request can be made of."""
    import httpx

    from cluster.clients.server import Server

    url = found(args.url, args.running)
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"--url {url}: {error}") from error
    return Server(url, key_of(args.api_key_file), timeout, verify=trusted(args.cacert) or True)


def _chat(args: argparse.Namespace) -> int:
    from cluster.clients import chat

    fields = {name: getattr(args, name) for name in ("model", "max_tokens", "temperature")}
    given = {name: value for name, value in fields.items() if value not in (None, "")}
    with _server(args, chat.TIMEOUT) as server:
        chat.converse(server, given, args.system, args.message)
    return 0


def _cache(args: argparse.Namespace) -> int:
    from cluster.clients import cache

    with _server(args, cache.TIMEOUT) as server:
        cache.show(server, forget=args.forget)
    return 0


def _top(args: argparse.Namespace) -> int:
    from cluster.clients import top

    with _server(args, top.TIMEOUT) as server:
        top.show(server, args.interval, once=args.once, as_json=args.json)
    return 0
