"""The command line: `python -m cluster` or `kvlane`. The only place that reads the environment.

Exit codes: 0 done, 1 something failed, 2 the user's mistake, 128 + signal: interrupted, which for
`serve` means before it was ready, or twice.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from cluster.config import Config, load
from cluster.owned import find_running
from cluster.search_path import leave_directory
from cluster.seats import SeatStatus
from cluster.supervisor import Lent, Limits, supervise
from worker.errors import KvlaneError, UserError

# Settings of Ray that have to be in the environment before it is imported. What the user has set
# wins. A node is found dead after 1.4 s instead of 14 s with these health checks. The memory
# monitor would kill workers on machines whose memory grows as it is used. Ray's workers, our
# engines, would run at nice 15 and give way to whatever else runs.
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
# Beyond their own limits, for the processes that `serve` starts to end by themselves.
JOINED_GRACE_S = 3.0  # on a Ray that we joined, after a signal while they start
END_MARGIN_S = 10.0
FLAGS = {
    "model": "model.path",
    "prefill": "prefill.replicas",
    "decode": "decode.replicas",
    "router": "routers.replicas",
    "host": "cluster.host",
    "port": "cluster.port",
    "api_key_file": "router.api_key_file",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname).1s %(name)s: %(message)s")
    command: Callable[[argparse.Namespace], int] = args.command
    if command is not _serve:  # which has its own way, see `supervisor`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return _guarded(lambda: command(args))


def _guarded(command: Callable[[], int]) -> int:
    try:
        return command()
    except UserError as error:
        return _fail(error, 2)
    except KvlaneError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlane",
        description="Serve a language model with separate prefill and decode workers.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start a cluster and serve until Ctrl-C")
    _add_config(serve)
    _add_address(serve, "join this Ray cluster instead of starting Ray here (also: RAY_ADDRESS)")
    serve.set_defaults(command=_serve)

    config = commands.add_parser("config", help="print the configuration that serve would use")
    _add_config(config)
    config.add_argument("--schema", action="store_true", help="print its JSON schema instead")
    config.set_defaults(command=_config)

    status = commands.add_parser("status", help="show what runs")
    _add_address(status, "the Ray cluster it runs on; default: the serve of this machine")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(command=_status)

    drain = commands.add_parser("drain", help="finish running requests, then stop")
    drain.add_argument("name", nargs="?", help="one worker or router; default: the whole cluster")
    drain.add_argument("--timeout", type=float, metavar="S", help="cut requests off after S s")
    _add_address(drain, "the Ray cluster it runs on; default: the serve of this machine")
    drain.set_defaults(command=_drain)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="PATH", help="'tiny' (bundled) or a model directory")
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers")
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers")
    parser.add_argument("--router", type=int, metavar="N", help="routers, on ports from --port on")
    parser.add_argument("--host", help="address that the routers listen on")
    parser.add_argument("--port", type=int, help="port of the first router; 0: any free one")
    parser.add_argument("--api-key-file", metavar="PATH", help="bearer keys to serve, one a line")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML, see the config command")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="one leaf of the configuration"
    )


def _add_address(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--address", metavar="HOST:PORT", help=text)


def _load(args: argparse.Namespace) -> Config:
    flags: dict[str, Any] = {path: getattr(args, flag) for flag, path in FLAGS.items()}
    return load(args.config, args.set, flags)


def _serve(args: argparse.Namespace) -> int:
    config = _load(args)
    address = args.address or os.environ.get("RAY_ADDRESS", "")
    if address == "local":
        address = ""
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # In a Ray cluster that we join, only the nodes of workers and routers need the model.
    if not address and not config.model.directory.is_dir():
        raise UserError(f"model.path: there is no directory {config.model.directory}")
    if not address:
        config = config.anchored(Path.cwd())
    auth_mode = _prepare_environment("" if address else "disabled")
    cluster = config.cluster
    return supervise(
        lambda lent: _guarded(lambda: _run(config, address, auth_mode, lent)),
        None if address else Path(tempfile.gettempdir()),
        _runtime_dir(),
        # Nothing has been served while it starts: a Ray of our own is killed, one that we joined
        # is told to end what we have started there.
        Limits(JOINED_GRACE_S if address else 0.0, cluster.stop_limit_s + END_MARGIN_S),
    )


def _run(config: Config, address: str, auth_mode: str, lent: Lent) -> int:
    """In the supervisor's child: start Ray where nothing of the user's can be imported."""
    leave_directory()
    from cluster.serve import serve  # imports Ray, which reads the environment

    # A stream of its own, so that what Ray's threads print to stderr does not split our lines.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as out:
        return serve(config, address, auth_mode, lent, out)


def _config(args: argparse.Namespace) -> int:
    if args.schema:
        print(json.dumps(Config.model_json_schema(), indent=2))
    else:
        print(yaml.safe_dump(_load(args).shown(), sort_keys=False), end="")
    return 0


def _status(args: argparse.Namespace) -> int:
    controller, close = _connect(args)
    from cluster import launch

    try:
        rows: list[SeatStatus] = launch.ask(controller.status)
    finally:
        close()
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(_table(rows))
    return 0


def _drain(args: argparse.Namespace) -> int:
    controller, close = _connect(args)
    from cluster import launch

    try:
        if args.name and (warning := launch.ask(controller.warning, args.name)):
            print(f"warning: {warning}", file=sys.stderr)
        idle: bool = launch.ask(controller.drain, args.name, args.timeout)
    finally:
        close()
    print(f"{args.name or 'the cluster'} is drained" + ("" if idle else "; requests were cut off"))
    return 0 if idle else 1


def _connect(args: argparse.Namespace) -> tuple[Any, Callable[[], None]]:
    """The controller of a running cluster, and what to call when done with it."""
    address: str = args.address or os.environ.get("RAY_ADDRESS", "")
    auth_mode, loopback = "", False
    try:
        running = find_running(_runtime_dir(), args.address or "")
        address, auth_mode, loopback = running.address, running.auth_mode, running.local
    except UserError:
        if not address:
            raise
    _prepare_environment(auth_mode)
    from cluster import launch

    session = launch.join(address, quiet=True, loopback=loopback)
    controller = launch.find_controller()
    if controller is None:
        session.close()
        raise UserError(f"no kvlane runs on the Ray cluster at {address}")
    return controller, session.close


def _prepare_environment(auth_mode: str) -> str:
    """Set what Ray reads when it is imported; returns RAY_AUTH_MODE, '' if it stays unset."""
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    if auth_mode:
        os.environ.setdefault("RAY_AUTH_MODE", auth_mode)
    return os.environ.get("RAY_AUTH_MODE", "")


def _runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return Path(base) / "kvlane"
    return Path(tempfile.gettempdir()) / f"kvlane-run-{os.getuid()}"


def _table(rows: Sequence[SeatStatus]) -> str:
    """The rows of `status` in columns, and below them the counters that are not zero."""
    head = ("NAME", "STATE", "INCARNATION", "RESTARTS", "NODE", "PID", "METRICS")
    cells = [
        (r.name, r.state, r.incarnation, str(r.restarts), r.node, str(r.pid), r.metrics_address)
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *cells)
    ]
    for row in rows:
        busy = {name: count for name, count in (row.counters or {}).items() if count}
        if busy:
            lines.append(f"{row.name}: {', '.join(f'{n} {c}' for n, c in busy.items())}")
    return "\n".join(lines)


def _fail(error: KvlaneError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
