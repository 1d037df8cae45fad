"""The command line: `python -m cluster` or `kvlane`. The only place that reads the environment.

Exit codes: 0 done, 1 something failed, 2 the user's mistake, 128 + signal: interrupted, which for
`serve` means before it was ready, or twice.
"""

from __future__ import annotations

import argparse
import errno
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

from cluster import clients, logs
from cluster.config import Config, load, origins
from cluster.owned import NothingRuns, all_running, find_running
from cluster.screen import table
from cluster.search_path import leave_directory
from cluster.seats import SeatStatus
from cluster.supervisor import Lent, Limits, supervise
from worker.errors import KvlaneError, UserError

# Settings of Ray that have to be in the environment before it is imported. What the user has set
# wins. The memory monitor would kill workers on machines whose memory grows as it is used. Ray's
# workers, our engines, would run at nice 15 and give way to whatever else runs. The quick health
# checks of a Ray of several nodes (deploy/, helm/) are left out: where there is one node alone,
# they find nothing but a busy machine, and end its Ray.
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
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
    "log_format": "cluster.log_format",
    "spec": "spec.drafter",
    "spec_path": "spec.path",
    "spec_simulate_accept_len": "spec.simulate_accept_len",
}


def _plainly(level: str, text: str) -> None:
    print(f"error: {text}" if level == "ERROR" else text, file=sys.stderr)


def _as_json(level: str, text: str) -> None:
    print(logs.line(text, "serve", level), file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname).1s %(name)s: %(message)s")
    return _guarded(lambda: _run_command(given))


def _run_command(given: Sequence[str]) -> int:
    if given[:1] == ["bench"]:  # it has a parser of its own
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return clients.bench(given[1:])
    args = _parser().parse_args(given)
    command: Callable[[argparse.Namespace], int] = args.command
    if command is not _serve:  # which has its own way, see `supervisor`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command(args)


def _guarded(command: Callable[[], int], tell: Callable[[str, str], None] = _plainly) -> int:
    """Its exit code; tell: says why it failed."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except UserError as error:
        tell("ERROR", str(error))
        return 2
    except KvlaneError as error:
        tell("ERROR", str(error))
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as in `kvlane config | head`
        _drop_output()
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:  # as in `kvlane config > /dev/full`
            raise
        _drop_output()
        tell("ERROR", f"cannot write: {error.strerror}")
        return 1


def _drop_output() -> None:
    """Nobody takes it: what is still buffered must not fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Version(argparse.Action):
    """`--version`; what it imports is not paid for by other commands."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        from router.show.status import version

        print(f"kvlane {version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlane",
        description="Serve a language model with separate prefill and decode workers.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="start a cluster and serve until Ctrl-C")
    _add_config(serve)
    _add_address(serve, "join this Ray cluster instead of starting Ray here (also: RAY_ADDRESS)")
    serve.add_argument("--offline", action="store_true", help="take no model from the network")
    serve.set_defaults(command=_serve)

    config = commands.add_parser("config", help="print the configuration that serve would use")
    _add_config(config)
    kind = config.add_mutually_exclusive_group()
    kind.add_argument("--schema", action="store_true", help="print its JSON schema instead")
    kind.add_argument(
        "--explain", action="store_true", help="say of each value where it comes from and why"
    )
    config.set_defaults(command=_config)

    status = commands.add_parser("status", help="show what runs")
    _add_address(status, "the Ray cluster it runs on; default: the serve of this machine")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(command=_status)

    doctor = commands.add_parser("doctor", help="say what is wrong here, or with what runs")
    _add_config(doctor)
    _add_address(doctor, "examine what runs on this Ray cluster")
    doctor.add_argument("--running", action="store_true", help="examine the serve of this machine")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=_doctor)

    drain = commands.add_parser("drain", help="finish running requests, then stop")
    drain.add_argument("name", nargs="?", help="one worker or router; default: the whole cluster")
    drain.add_argument("--timeout", type=float, metavar="S", help="cut requests off after S s")
    _add_address(drain, "the Ray cluster it runs on; default: the serve of this machine")
    drain.set_defaults(command=_drain)

    down = commands.add_parser("down", help="end what runs, if anything does")
    _add_address(down, "the Ray cluster it runs on; default: the serve of this machine")
    down.set_defaults(command=_down)

    clients.add_to(commands, lambda: [url for r in all_running(_runtime_dir()) for url in r.urls])
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH", help="'tiny' (bundled), a model directory, or a name on the hub"
    )
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers")
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers")
    parser.add_argument("--router", type=int, metavar="N", help="routers, all on one port")
    parser.add_argument("--host", help="address that the routers listen on")
    parser.add_argument("--port", type=int, help="port of the routers; 0: any free one")
    parser.add_argument("--api-key-file", metavar="PATH", help="bearer keys to serve, one a line")
    parser.add_argument("--log-format", metavar="FORM", help="text, or json: an object a line")
    parser.add_argument("--spec", metavar="DRAFTER", help="what drafts: none, chain, dflash, ngram")
    parser.add_argument("--spec-path", metavar="PATH", help="directory of the drafter")
    parser.add_argument(
        "--spec-simulate-accept-len",
        type=float,
        metavar="X",
        help="to measure speculation on random weights: X tokens of a step count; answers are junk",
    )
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
    tell = _plainly
    if config.cluster.log_format == "json":
        tell = _as_json
        os.environ.setdefault("RAY_DISABLE_WORKER_LOG_PREFIX", "1")  # it names the process
    return _guarded(lambda: _start(config, args.offline, address, tell), tell)


def _start(config: Config, offline: bool, address: str, tell: Callable[[str, str], None]) -> int:
    """What is wrong with the configuration is told before anything starts."""
    from cluster.check import checked
    from cluster.doctor.command import warnings

    num_gpus = None if address else _num_gpus(config)
    config = checked(config, num_gpus, offline=offline)
    for text in warnings(config, num_gpus):
        tell("WARNING", text)
    if not address:
        config = config.anchored(Path.cwd())
    auth_mode = _prepare_environment("" if address else "disabled")
    cluster = config.cluster
    return supervise(
        lambda lent: _guarded(lambda: _run(config, address, auth_mode, lent), tell),
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


def _num_gpus(config: Config) -> int:
    """GPUs that the Ray which we start will count."""
    from cluster.nvml import count_gpus

    asked = config.cluster.local_ray.num_gpus
    return count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if asked == "auto" else asked


def _config(args: argparse.Namespace) -> int:
    if args.schema:
        print(json.dumps(Config.model_json_schema(), indent=2))
    elif args.explain:
        from cluster.explain import explain

        config = _load(args)
        given = {
            path: f"--{flag.replace('_', '-')}"
            for flag, path in FLAGS.items()
            if getattr(args, flag) is not None
        }
        for line in explain(config, origins(args.config, args.set, given), _num_gpus(config)):
            print(line)
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
        print(table(rows))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from cluster.doctor import command

    config = _load(args)
    if not (args.running or args.address):
        return command.tell(command.of_machine(config, _num_gpus(config)), as_json=args.json)
    controller, close = _connect(args)
    from cluster import launch

    try:
        examined = launch.ask(controller.examine)
    finally:
        close()
    return command.tell(command.of_cluster(config, examined), as_json=args.json)


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


def _down(args: argparse.Namespace) -> int:
    try:
        controller, close = _connect(args)
    except NothingRuns as error:
        print(error)
        return 0
    from cluster import launch

    try:
        idle = launch.down(controller)
    finally:
        close()
    print("kvlane is down" + ("" if idle else "; requests were cut off"))
    return 0


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
        raise NothingRuns(f"no kvlane runs on the Ray cluster at {address}")
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
