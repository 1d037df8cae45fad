"""Run commands against a fresh cluster, server and client alone together in a network namespace.

    python -m benchmarks.judges.served [--serve "--decode 2"] -- COMMAND ... [-- COMMAND ...]

Starts `python -m cluster serve` with a loopback interface only, waits until it is ready, runs the
commands one after another with `JUDGED_URL` set (and `{url}` in their arguments replaced), and ends
the cluster. Everything dies with this process. The cluster's output is in `--keep`, or printed if
a command fails. Needs root for `unshare`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
INSIDE = "KVLANE_JUDGES_NAMESPACE"
UNSHARE = ("unshare", "-n", "-p", "-f", "--mount-proc", "--kill-child")
READY = "Ctrl-C stops it."
READY_TIMEOUT_S = 180.0


def enter_namespace() -> None:
    """Start over inside a namespace; returns once inside."""
    if os.environ.get(INSIDE):
        return
    os.environ[INSIDE] = "1"
    again = [sys.executable, "-m", "benchmarks.judges.served", *sys.argv[1:]]
    script = 'ip link set lo up; "$@"; exit $?'  # bash stays: the first process has to reap
    os.execvp(UNSHARE[0], [*UNSHARE, "bash", "-c", script, "bash", *again])


def environment(root: Path) -> dict[str, str]:
    """For the cluster: Ray without its defaults, every file below `root`."""
    for name in ("tmp", "run"):
        (root / name).mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    own = {"TMPDIR": str(root / "tmp"), "XDG_RUNTIME_DIR": str(root / "run")}
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    return {**kept, **own, **ray}


def wait_ready(server: subprocess.Popen[bytes], output: Path) -> None:
    """Until it has printed its URL."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while READY not in output.read_text(encoding="utf-8", errors="replace"):
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"serve is not ready:\n{output.read_text(errors='replace')}")
        time.sleep(0.1)


def split(arguments: list[str]) -> list[list[str]]:
    """At every `--`."""
    commands: list[list[str]] = [[]]
    for word in arguments:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    return [c for c in commands if c]


def main() -> int:
    """The exit code of the first command that failed, or 0."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="one that can run the cluster")
    parser.add_argument("--serve", default="", help="more arguments for `serve`, as one string")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--keep", type=Path, help="where to copy the cluster's output")
    options = parser.parse_args(words[:cut])
    commands = split(words[cut:])
    enter_namespace()
    root = Path(tempfile.mkdtemp(prefix="jd"))  # short: Ray's sockets lie below it
    output = root / "output"
    url = f"http://127.0.0.1:{options.port}"
    serve = [options.python, "-m", "cluster", "serve", "--port", str(options.port)]
    code = 0
    with output.open("wb") as log:
        server = subprocess.Popen(
            [*serve, *shlex.split(options.serve)],
            cwd=REPOSITORY,
            env=environment(root),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_ready(server, output)
        for command in commands:
            filled = [word.replace("{url}", url) for word in command]
            done = subprocess.run(filled, env={**os.environ, "JUDGED_URL": url}, check=False)
            print(f"exit code {done.returncode}: {shlex.join(filled)}", file=sys.stderr, flush=True)
            code = code or done.returncode
    finally:
        server.terminate()
        try:
            server.wait(40)
        except subprocess.TimeoutExpired:
            server.kill()
        if code:
            sys.stderr.write(output.read_text(errors="replace"))
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(output, options.keep / "cluster.log")
        shutil.rmtree(root, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
