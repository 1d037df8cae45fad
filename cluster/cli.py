"""The command line: `python -m cluster` or `kvlane`. The only place that reads the environment.

Exit codes: 0 done, 1 something failed, 2 the user's mistake, 128 + signal: interrupted, of `serve`
before it was ready, or twice.
"""

import argparse
import errno
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from cluster import logs
from cluster.clients import commands as clients
from cluster.clients import operators
from cluster.config import Config, origins
from cluster.control.replicas import ReplicaStatus
from cluster.flags import add_flags, given, load_config, tell_aliases
from cluster.search_path import leave_directory
from cluster.serve.lifetime import NothingRuns, all_running, find_running, made_token
from cluster.serve.supervisor import Lent, Limits, supervise
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
# Of a Ray of our own: its GCS keeps its tables on disk, and all others wait for the next one.
STORAGE = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_rpc_server_reconnect_timeout_s": "86400"}
# Beyond their own limits, for the processes that `serve` starts to end by themselves.
JOINED_GRACE_S = 3.0  # on a Ray that we joined, after a signal while they start
END_MARGIN_S = 10.0
NEXT_CONTROLLER_S = 15.0  # for one to come where another one is gone
ONE_SERVE = "the Ray cluster it runs on; default: the serve of this machine"

Run = Callable[[argparse.Namespace], int]


def _plainly(level: str, text: str) -> None:
    print(f"error: {text}" if level == "ERROR" else text, file=sys.stderr)


def _as_json(level: str, text: str) -> None:
    print(logs.line(text, "serve", level), file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname).1s %(name)s: %(message)s")
    return _guarded(lambda: _run_command(words))


def _run_command(words: Sequence[str]) -> int:
    if words[:1] != ["serve"]:  # which has its own way, see `supervisor`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if words[:1] == ["bench"]:
        return clients.bench(words[1:], _urls)
    if words[:1] == ["--version"]:
        from cluster.diagnose.facts import build  # which others need not wait for

        print(f"kvlane {build()}")
        return 0
    args = parser_of_commands().parse_args(words)
    command: Run = args.command
    if command is not _serve:  # which may have to tell it as JSON
        tell_aliases(args, _plainly)
    return command(args)


def _guarded(command: Callable[[], int], tell: Callable[[str, str], None] = _plainly) -> int:
    """The exit code of a command; `tell` says why it failed."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KvlaneError as error:
        tell("ERROR", str(error))
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # as in `kvlane config | head`, and `kvlane config > /dev/full`
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # What is still buffered must not fail again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # whoever read our output has gone
            return 141
        tell("ERROR", f"cannot write: {error.strerror}")
        return 1


def parser_of_commands() -> argparse.ArgumentParser:
    """Of all commands but `bench`, which has its own."""
    parser = argparse.ArgumentParser(
        prog="kvlane",
        allow_abbrev=False,
        description="Serve a language model with separate prefill and decode workers.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Run, help: str, address: str = ONE_SERVE) -> Any:
        added = commands.add_parser(name, help=help, allow_abbrev=False)
        added.set_defaults(command=run)
        if run in (_serve, _config, _doctor, restart):
            add_flags(added, positional=run is not restart)  # which takes a worker's name
        if address:
            added.add_argument("--address", metavar="HOST:PORT", help=address)
        return added

    restart = _asked(operators.restart)
    joined = "join this Ray cluster instead of starting Ray here (also: RAY_ADDRESS)"
    serve = command("serve", _serve, "start a cluster and serve until Ctrl-C", joined)
    serve.add_argument("--offline", action="store_true", help="take no model from the network")
    config = command("config", _config, "print the configuration; auto stays auto", "")
    kind = config.add_mutually_exclusive_group()
    kind.add_argument("--schema", action="store_true", help="print its JSON schema instead")
    kind.add_argument(
        "--explain", action="store_true", help="say what serve makes of every value, and why"
    )
    status = command("status", _asked(operators.status), "show what runs")
    examined = "examine what runs on this Ray cluster"
    doctor = command("doctor", _doctor, "say what is wrong here, or with what runs", examined)
    doctor.add_argument("--running", action="store_true", help="examine the serve of this machine")
    doctor.add_argument("--ports", action="store_true", help="show its ports, and who is let in")
    drain = command("drain", _asked(operators.drain), "finish running requests, then stop")
    drain.add_argument("name", nargs="?", help="one worker or router; default: the whole cluster")
    drain.add_argument("--timeout", type=float, metavar="S", help="hand over or cut off after S s")
    about = "replace workers one after another, also with other settings (--set) or weights"
    restarted = command("restart", restart, about)
    restarted.add_argument("name", nargs="?", help="one worker or router; default: all workers")
    scale = command("scale", _asked(operators.scale), "have so many workers, or routers, of a role")
    scale.add_argument(
        "wanted", nargs="+", type=operators.wanted, metavar="ROLE=N", help="decode=3"
    )
    role = command("role", _asked(operators.role), "make a worker a prefill or decode worker")
    role.add_argument("name", help="the worker")
    role.add_argument("role", choices=("prefill", "decode"))
    for parser_of_change in (restarted, scale, role):
        help_of_timeout = "hand requests over after S s; default: cluster.drain_timeout_s"
        parser_of_change.add_argument("--timeout", type=float, metavar="S", help=help_of_timeout)
    command("down", _down, "end what runs, if anything does")
    for parser_of_json in (status, doctor):
        parser_of_json.add_argument("--json", action="store_true", help="print JSON")
    clients.add_to(commands, _urls)
    return parser


def _serve(args: argparse.Namespace) -> int:
    config = load_config(args)
    address = args.address or os.environ.get("RAY_ADDRESS", "")
    if address == "local":
        address = ""
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    tell = _plainly
    if config.cluster.log_format == "json":
        tell = _as_json
        os.environ.setdefault("RAY_DISABLE_WORKER_LOG_PREFIX", "1")  # it names the process
    tell_aliases(args, tell)
    return _guarded(lambda: _start(config, args.offline, address, tell), tell)


def _start(config: Config, offline: bool, address: str, tell: Callable[[str, str], None]) -> int:
    from cluster.diagnose.checks import checked
    from cluster.resolve import does_both

    num_gpus = None if address else _num_gpus(config)
    config, warnings = checked(config, num_gpus, offline=offline)
    for text in warnings:
        tell("WARNING", text)
    if does_both(config, num_gpus):
        tell("INFO", "one GPU: one worker prefills and decodes; for one of each: --prefill 1")
    if not address:
        config = config.anchored(Path.cwd())
    _prepare_environment()
    cluster = config.cluster
    return supervise(
        lambda lent: _guarded(lambda: _run(config, address, lent), tell),
        None if address else Path(tempfile.gettempdir()),
        _runtime_dir(),
        # Nothing has been served while it starts: a Ray of our own is killed, one that we joined
        # is told to end what we have started there.
        Limits(JOINED_GRACE_S if address else 0.0, cluster.stop_limit_s + END_MARGIN_S),
    )


def _run(config: Config, address: str, lent: Lent) -> int:
    leave_directory()
    if lent.directory is not None:
        os.environ |= STORAGE | {"RAY_gcs_storage_path": str(lent.directory / "gcs")}
        if "RAY_AUTH_MODE" not in os.environ:
            _ask_for_token(made_token(lent.directory))
    from cluster.serve.run import serve  # imports Ray, which reads the environment

    # A stream of its own, so that what Ray's threads print to stderr does not split our lines.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as out:
        return serve(config, address, lent, out)


def _num_gpus(config: Config) -> int:
    """GPUs that a Ray of our own will count."""
    from cluster.diagnose.facts import count_gpus

    asked = config.cluster.local_ray.num_gpus
    return count_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) if asked == "auto" else asked


def _config(args: argparse.Namespace) -> int:
    if args.schema:
        print(json.dumps(Config.model_json_schema(), indent=2))
    elif args.explain:
        from cluster.diagnose.facts import read_driver
        from cluster.resolve import explain

        config = load_config(args)
        flags = {leaf: flag for flag, leaf, _ in given(args)}
        sources = origins(args.config, args.set, flags)
        for line in explain(config, sources, _num_gpus(config), read_driver().peer_access):
            print(line)
    else:
        print(yaml.safe_dump(load_config(args).shown(), sort_keys=False), end="")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from cluster.diagnose import checks, running
    from cluster.diagnose.facts import build, read_facts
    from cluster.diagnose.finding import has_failure, shown

    config = load_config(args)
    if args.ports:
        with _connected(args) as ask:
            from cluster.diagnose.ports import Member, report_of_ports
            from cluster.sites.ray_private import ray_here

            rows: list[ReplicaStatus] = ask("status")
            members = [Member._make(map(partial(getattr, row), Member._fields)) for row in rows]
            serves = {serve.pid: serve.address for serve in all_running(_runtime_dir())}
            decided: Config = ask("configuration", True)
            text, code = report_of_ports(members, decided, ray_here(), serves, as_json=args.json)
        print(text)
        return code
    if args.running or args.address:
        with _connected(args) as ask:
            cluster: running.ClusterExamination = ask("examine")
        findings = [
            running.of_command(build(), cluster), *running.of_cluster(config.transport, cluster)
        ]  # fmt: skip
    else:
        findings = checks.of_machine(config, _num_gpus(config), read_facts())
    print(shown(findings, as_json=args.json))
    return int(has_failure(findings))


def _down(args: argparse.Namespace) -> int:
    try:
        with _connected(args) as ask:
            from cluster.serve import launch

            idle: bool = ask("down")
            launch.wait_gone()
    except NothingRuns as error:
        print(error)
        return 0
    print("kvlane is down" + ("" if idle else operators.CUT_OFF))
    return 0


def _asked(run: Callable[[argparse.Namespace, operators.Ask], int]) -> Run:
    """A command that asks what runs."""

    def connected(args: argparse.Namespace) -> int:
        with _connected(args) as ask:
            return run(args, ask)

    return connected


@contextmanager
def _connected(args: argparse.Namespace) -> Generator[Callable[..., Any]]:
    """To a running cluster: calls a method of its controller, by name. Raises NothingRuns."""
    address: str = args.address or os.environ.get("RAY_ADDRESS", "")
    loopback, runs = False, False
    try:
        running = find_running(_runtime_dir(), args.address or "")
        address, loopback = running.address, running.local
        runs = True
        if running.auth_mode:
            os.environ.setdefault("RAY_AUTH_MODE", running.auth_mode)
        if running.auth_mode == "token" and running.token_path:
            _ask_for_token(running.token_path)
    except UserError:
        if not address:
            raise
    _prepare_environment()
    from cluster.serve import launch

    launch.join(address, quiet=True, loopback=loopback)
    try:
        try:
            controller = launch.next_controller(NEXT_CONTROLLER_S if runs else 0.0)
        except launch.ControllerGone:
            raise NothingRuns(f"no kvlane runs on the Ray cluster at {address}") from None

        def ask(method: str, *args: object) -> Any:
            try:
                return launch.ask(getattr(controller, method), *args)
            except launch.ControllerGone:
                after = launch.next_controller(NEXT_CONTROLLER_S)
                return launch.ask(getattr(after, method), *args)

        yield ask
    finally:
        launch.RAY.shutdown()


def _prepare_environment() -> None:
    """Set what Ray reads when it is imported."""
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)


def _ask_for_token(path: str) -> None:
    """Ray's processes answer whoever knows what the file at `path` says; set before it starts."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path}


def _urls() -> list[str]:
    """Of what this machine serves."""
    return [url for serve in all_running(_runtime_dir()) for url in serve.urls]


def _runtime_dir() -> Path:
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "kvlane"
    return Path(tempfile.gettempdir()) / f"kvlane-run-{os.getuid()}"
