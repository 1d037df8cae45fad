"""Directories that are kept for as long as a process of tests runs; its session's end removes them.

`atexit` would not do: processes of pytest-xdist end without it.
"""

import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path(tempfile.gettempdir()) / f"kvlane-tests-{os.getpid()}"


def place(name: str) -> Path:
    """A new directory."""
    ROOT.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=ROOT))


def remove() -> None:
    """All of them."""
    shutil.rmtree(ROOT, ignore_errors=True)
