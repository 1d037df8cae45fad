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
