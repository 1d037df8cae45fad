"""What the judges share: a tokenizer they accept, running one, one format of results."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENIZER = REPOSITORY / "worker" / "assets" / "tiny"
HUB_NAME = "local/tiny"  # of the tokenizer inside the hub cache that `tokenizer_cache` lays out
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

Spread = dict[str, float]  # p50, p99, mean


@dataclass(slots=True)
class Figures:
    """The judge's own figures under our names; `itl_ms` is over requests, `gaps_ms` over chunks."""

    tool: str
    version: str
    command: list[str]
    label: str  # which of the judge's runs, for example "constant 4/s"
    requests: int  # that succeeded
    errors: int
    wall_s: float
    request_per_s: float
    output_tokens_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    gaps_ms: Spread | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def arguments(description: str, venv: str) -> argparse.ArgumentParser:
    """The options every judge has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, without /v1")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a directory")
    parser.add_argument(
        "--venv", type=Path, default=Path(venv), help="where the judge is installed"
    )
    parser.add_argument("--out", type=Path, help="normalised JSON; standard output without it")
    parser.add_argument("--keep", type=Path, help="directory for the judge's own files")
    parser.add_argument("--seed", type=int, default=7)
    return parser


@contextmanager
def workplace(keep: Path | None) -> Iterator[Path]:
    """A directory for the judge's files: `keep`, or a temporary one."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="judge-") as name:
        yield Path(name)


def tokenizer_cache(tokenizer: Path, home: Path) -> dict[str, str]:
    """Lay the tokenizer out as a Hugging Face hub cache; the environment that makes it `HUB_NAME`.

    aiperf looks a tokenizer up by repository name only once it is offline, and its trace replay
    goes offline by itself, so a plain directory does not do.
    """
    commit = hashlib.sha1((tokenizer / "tokenizer.json").read_bytes()).hexdigest()  # only a name
    repository = home / "hub" / ("models--" + HUB_NAME.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, snapshot / name)
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def run(command: list[str], extra: dict[str, str], cwd: Path) -> None:
    """Run a judge to its end; its output goes to standard error and to `output` in `cwd`."""
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment = {**kept, **extra, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    with (cwd / "output").open("w", encoding="utf-8") as log:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert child.stdout is not None
        for line in child.stdout:
            log.write(line)
            sys.stderr.write(line)
    if child.wait() != 0:
        raise SystemExit(f"{command[0]} ended with exit code {child.returncode}")


def version(venv: Path, package: str) -> str:
    """Of an installed package of another virtual environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    python = str(venv / "bin" / "python")
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def write(results: list[Figures], out: Path | None) -> None:
    """One object for one run, a list for several."""
    rows = [asdict(r) for r in results]
    text = json.dumps(rows[0] if len(rows) == 1 else rows, indent=1) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")
