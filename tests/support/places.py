"""Directories that are kept for as long as a process of tests runs; its session's end removes them.

`atexit` would not do: processes of pytest-xdist end without it.
"""

import shutil
import tempfile
from pathlib import Path

_made: list[Path] = []


def place(name: str) -> Path:
    """A new directory."""
    _made.append(Path(tempfile.mkdtemp(prefix=f"kvlane-{name}-")))
    return _made[-1]


def remove() -> None:
    """All of them."""
    while _made:
        shutil.rmtree(_made.pop(), ignore_errors=True)


def on_disk_bytes(folder: Path) -> int:
    """Of all files below it, in whole blocks; one that is evicted meanwhile is none."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += 512 * path.stat().st_blocks
        except FileNotFoundError:
            continue
    return found
