"""Run commands against a fresh cluster, server and client alone together in a network namespace.

    python -m benchmarks.judges.served [--serve "--decode 2"] -- COMMAND ... [-- COMMAND ...]
    python -m benchmarks.judges.served --model-config benchmarks/models/small.json -- COMMAND ...

Starts `python -m cluster serve` with a loopback interface only, waits until it is ready, runs the
commands one after another with `{url}` in their arguments replaced, and ends the cluster.
Everything dies with this process. The cluster's output is in `--keep`, or printed if a command
fails. Needs root and iproute2, see `benchmarks.namespace`.

`--model-config` serves random weights of that shape, with the tiny model's tokenizer and under the
name `dummy`: a model whose own times are large against a client's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.namespace import can_enter, start_over

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "worker" / "assets" / "tiny"
INSIDE = "KVLANE_JUDGES_NAMESPACE"
READY = "Ctrl-C stops it."
READY_TIMEOUT_S = 600.0


def enter_namespace(module: str) -> None:
    """Start `python -m module` over inside a namespace; returns once inside.

    Raises:
        SystemExit: none can be made here.
    """
    if os.environ.get(INSIDE):
        return
    if not can_enter():
        sys.exit(f"not root, or no `ip` (iproute2) for a namespace; {INSIDE}=1 runs without one")
    os.environ[INSIDE] = "1"
    start_over([sys.executable, "-m", module, *sys.argv[1:]])


def environment(root: Path) -> dict[str, str]:
    """For the cluster: Ray without its defaults, every file below `root`."""
    for name in ("tmp", "run"):
        (root / name).mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    own = {"TMPDIR": str(root / "tmp"), "XDG_RUNTIME_DIR": str(root / "run")}
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    return {**kept, **own, **ray}


def make_model(model_config: Path, place: Path) -> None:
    """A model directory without weights, with a word for every token id.

    The bundled tokenizer makes the prompts; ids beyond its own stand for numbers, so that every
    token that random weights draw is a piece of text, and so of the stream.
    """
    shutil.copy(model_config, place / "config.json")
    shutil.copy(TINY / "tokenizer_config.json", place)
    size = json.loads(model_config.read_text(encoding="utf-8"))["vocab_size"]
    tokenizer = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words |= {f"\u0120{token}": token for token in range(len(words), size)}  # \u0120 is a space
    (place / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def wait_ready(server: subprocess.Popen[bytes], output: Path) -> None:
    """Until it has printed its URL."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while READY not in output.read_text(encoding="utf-8", errors="replace"):
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"serve is not ready:\n{output.read_text(errors='replace')}")
        time.sleep(0.1)


@contextlib.contextmanager
def serving(arguments: list[str], port: int, *, keep: Path) -> Iterator[str]:
    """A cluster that is ready; its URL. Ended after the body, its output is copied to `keep`.

    Raises:
        SystemExit: it does not become ready; the message has its output.
    """
    root = Path(tempfile.mkdtemp(prefix="jd"))  # short: Ray's sockets lie below it
    output = root / "output"
    with output.open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "cluster", "serve", "--port", str(port), *arguments],
            cwd=REPOSITORY,
            env=environment(root),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_ready(server, output)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(40)
        except subprocess.TimeoutExpired:
            server.kill()
        keep.mkdir(parents=True, exist_ok=True)
        shutil.copy(output, keep / "cluster.log")
        shutil.rmtree(root, ignore_errors=True)


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
    parser.add_argument("--serve", default="", help="more arguments for `serve`, as one string")
    parser.add_argument("--model-config", type=Path, help="random weights of this shape")
    parser.add_argument("--keep", type=Path, help="where to copy the cluster's output")
    options = parser.parse_args(words[:cut])
    enter_namespace("benchmarks.judges.served")
    code = 0
    with tempfile.TemporaryDirectory(prefix="judged-") as place:
        keep = options.keep or Path(place)
        arguments = shlex.split(options.serve)
        if options.model_config:
            model = Path(place) / "dummy"
            model.mkdir()
            make_model(options.model_config, model)
            arguments += ["--model", str(model), "--set", "model.load_format=dummy"]
        with serving(arguments, 8000, keep=keep) as url:
            for command in split(words[cut:]):
                filled = [word.replace("{url}", url) for word in command]
                done = subprocess.run(filled, check=False)
                text = f"exit code {done.returncode}: {shlex.join(filled)}"
                print(text, file=sys.stderr, flush=True)
                code = code or done.returncode
        if code:
            sys.stderr.write((keep / "cluster.log").read_text(errors="replace"))
    return code


if __name__ == "__main__":
    sys.exit(main())
