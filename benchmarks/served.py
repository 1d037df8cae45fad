"""A fresh cluster, alone with its client in a network namespace with a loopback interface only.

Ray binds the machine's real address; in such a namespace there is none. Needs root, `unshare` and
iproute2.
"""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

UNSHARE = ("unshare", "-n", "-p", "-f", "--mount-proc", "--kill-child")
LOOPBACK_UP = ("ip", "link", "set", "lo", "up")
REPOSITORY = Path(__file__).resolve().parents[1]
TINY = REPOSITORY / "worker" / "assets" / "tiny"
INSIDE = "KVLANE_JUDGES_NAMESPACE"
READY = "Ctrl-C stops it."
READY_TIMEOUT_S = 600.0


def can_enter() -> bool:
    """Whether one can be made here, and its loopback brought up."""
    try:
        return subprocess.call([*UNSHARE, *LOOPBACK_UP], stderr=subprocess.DEVNULL) == 0
    except FileNotFoundError:
        return False


def start_over(command: Sequence[str], *first: Sequence[str]) -> NoReturn:
    """Become `command` in a new one, with pids of its own, once the commands `first` have run."""
    setup = "; ".join(shlex.join(each) for each in (LOOPBACK_UP, *first))
    script = f'{setup}; "$@"; exit $?'  # bash stays: the first process has to reap
    os.execvp(UNSHARE[0], [*UNSHARE, "bash", "-c", script, "bash", *command])


def enter_namespace(module: str) -> None:
    """Start `python -m module` over inside a namespace; returns once inside.

    Raises SystemExit where none can be made.
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
    ray = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
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


def get(url: str) -> str:
    """What a URL answers."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def wait_ready(server: subprocess.Popen[bytes], output: Path) -> None:
    """Until it has printed its URL."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while READY not in output.read_text(encoding="utf-8", errors="replace"):
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"serve is not ready:\n{output.read_text(errors='replace')}")
        time.sleep(0.1)


@contextlib.contextmanager
def serving(
    arguments: list[str], port: int, *, keep: Path, root: Path | None = None
) -> Iterator[str]:
    """A cluster that is ready; its URL. Ended after the body, its output is copied to `keep`.

    root: a folder for all its files, with a short path, which is removed; None: one of its own.

    Raises SystemExit, with its output, if it does not become ready.
    """
    root = root or Path(tempfile.mkdtemp(prefix="jd"))  # short: Ray's sockets lie below it
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
