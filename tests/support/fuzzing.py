"""What the command lines of the fuzzers share: their options, a cluster, and the verdict."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.harness import Serve
from tests.support.disturbed import Watched, watching


def parser_of(text: str | None, unit: str) -> argparse.ArgumentParser:
    """unit: what is sent, and the option that says of how much."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(f"--{unit}", type=int, default=0, help="then it ends; 0: any number")
    parser.add_argument("--rate", type=float, default=0.0, help=f"{unit} a second; 0: no limit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--undisturbed-s", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="of the cluster"
    )
    return parser


@contextmanager
def watched_cluster(args: argparse.Namespace, *arguments: str) -> Iterator[tuple[Serve, Watched]]:
    """A cluster that a client has used undisturbed; it ends with it."""
    with tempfile.TemporaryDirectory(prefix="kvl-fuzz-", dir="/tmp") as root:
        more = [word for each in args.set for word in ("--set", each)]
        serve = Serve(Path(root)).start(*arguments, *more)
        try:
            with watching(serve.wait_ready(), args.undisturbed_s) as watched:
                yield serve, watched
        finally:
            serve.end()


def kept(of: str, seed: int, breaches: Sequence[str], sent: object, place: Path) -> Path:
    """A file with what is wrong, the seed, and what was sent."""
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"fuzz-{of}-{seed}-{int(time.time())}.json"
    path.write_text(json.dumps({"seed": seed, "breaches": list(breaches), "sent": sent}))
    return path


def tell_breaches(serve: Serve, breaches: Sequence[str], kept: Path) -> None:
    """Print them, and where what was sent is kept."""
    print("\n".join(f"BREACH: {each}" for each in breaches))
    print(f"kept in {kept}")
    print(serve.output[-6000:])
