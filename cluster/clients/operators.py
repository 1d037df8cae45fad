"""What an operator asks of a controller: the state of its cluster, changes while that serves."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.config import Config, changed
from cluster.control.replicas import ReplicaStatus
from cluster.flags import given, load_config
from worker.api import Role
from worker.errors import UserError

CUT_OFF = "; requests were cut off"
HANDED_OVER = "; others go on with what it had begun"
SCALED: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "router": "router"}

Ask = Callable[..., Any]  # calls a method of the controller, by name


def status(args: argparse.Namespace, ask: Ask) -> int:
    """Show what runs."""
    rows: list[ReplicaStatus] = ask("status")
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(status_table(rows, time.time()))
    return 0


def status_table(rows: Sequence[ReplicaStatus], now: float) -> str:
    """The rows for people. now: seconds since 1970."""
    from cluster.tables import plain, span, table, text

    if not rows:
        return "nothing is left; kvlane scale router=1 prefill=1 decode=1 starts it"
    head = ("NAME", "STATE", "ROLE", "MODEL", "UPTIME", "RESTARTS", "NODE", "PID", "URL",
            "METRICS", "INCARNATION")  # fmt: skip
    cells = [
        (r.name, ", ".join(filter(None, (r.state, r.progress))), r.role, r.model,
         span(now - r.ready_at) if r.ready_at else "", str(r.restarts), r.node,
         " ".join(map(str, r.pids)), r.address if r.role == "router" else "", r.metrics_address,
         r.incarnation)
        for r in sorted(rows, key=lambda r: (r.role, len(r.name), r.name))
    ]  # fmt: skip
    busy = {r.name: [f"{n} {c}" for n, c in (r.counters or {}).items() if c] for r in rows}
    lines = [text(f"{name}: {', '.join(counts)}") for name, counts in busy.items() if counts]
    return plain([table(head, cells), *lines])


def drain(args: argparse.Namespace, ask: Ask) -> int:
    """Finish what one name, or everything, has to do, and end it."""
    warning: str = ask("warning", args.name) if args.name else ""
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    idle: bool = ask("drain", args.name, args.timeout)
    # What a worker has begun others go on with; what a router has ends with it.
    ends = not args.name or warning or args.name.startswith("router-")
    left = "" if idle else CUT_OFF if ends else HANDED_OVER
    print(f"{args.name or 'the cluster'} is drained{left}")
    return int(left == CUT_OFF)


def scale(args: argparse.Namespace, ask: Ask) -> int:
    """Have so many processes of a role."""
    wanted: dict[Role, int] = dict(args.wanted)
    if len(wanted) < len(args.wanted):
        raise UserError("a role is given twice; name it once")
    started, drained = ask("scale", wanted, _timeout_s(args, ask("configuration")))
    for role, num in wanted.items():
        came, went = (", ".join(n for n, r in of.items() if r == role) for of in (started, drained))
        done = f"{came} started" if came else f"{went} drained" if went else "nothing to do"
        print(f"{role}={num}: {done}")
    if wanted.get("decode") == 0:
        print("warning: no decode worker is left: requests get 503", file=sys.stderr)
    return 0


def wanted(word: str) -> tuple[Role, int]:
    """A role and how many of it, from ROLE=N; raises ArgumentTypeError."""
    name, _, num = word.partition("=")
    role = SCALED.get(name)
    if role is None or not num.isdecimal():
        lack = f"{word}: expected ROLE=N, as decode=3; roles: {', '.join(SCALED)}"
        raise argparse.ArgumentTypeError(lack)
    return role, int(num)


def restart(args: argparse.Namespace, ask: Ask) -> int:
    """Replace the process of a name, or of all workers."""
    from cluster.diagnose.checks import check_model, fetched

    running: Config = ask("configuration")
    flags = {leaf: value for _, leaf, value in given(args)}
    config = load_config(args) if args.config else changed(running, args.set, flags)
    if config.model != running.model or config.spec != running.spec:
        config = fetched(config, offline=False).anchored(Path.cwd())
        check_model(config)
    ask("restart", args.name, config, _timeout_s(args, running))
    print(f"{args.name or 'every worker'} was restarted")
    return 0


def role(args: argparse.Namespace, ask: Ask) -> int:
    """Give a worker the other role."""
    ask("turn", args.name, args.role, _timeout_s(args, ask("configuration")))
    print(f"{args.name} is a {args.role} worker")
    return 0


def _timeout_s(args: argparse.Namespace, config: Config) -> float:
    return config.cluster.drain_timeout_s if args.timeout is None else args.timeout
