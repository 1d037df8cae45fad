"""What every benchmark does alike: its command line's parser, lists by commas, the JSON file."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.load.result import machine, version_of

PACKAGES = ("torch", "triton", "flashinfer-python", "ray", "mooncake-transfer-engine-cuda13")


def described(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, allow_abbrev=False, formatter_class=raw)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The same with `--json`."""
    made = described(description)
    made.add_argument("--json", type=Path, metavar="FILE", help="what was measured")
    return made


def ints(text: str) -> list[int]:
    """Whole numbers, by commas."""
    return [int(part) for part in text.split(",")]


def shown(options: argparse.Namespace) -> dict[str, str]:
    """The command line, for the file."""
    return {name: str(value) for name, value in vars(options).items()}


def write(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures with the machine (its commit, too) and versions; None: nowhere."""
    if path is not None:
        versions = {name: version_of(name) for name in PACKAGES}
        whole = {"machine": machine(), "versions": versions, **figures}
        path.write_text(json.dumps(whole, indent=1) + "\n")
