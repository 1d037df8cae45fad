"""Keeps a `worker.py`, `router.py`, `cluster/` or `ray.py` of the user's from hiding a package.

Imports the standard library only: it has to work before our packages are looked for.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # where our packages lie


def forget_directory() -> None:
    """Import nothing from the current directory, unless it is the one where our packages lie.

    `python -m` and an empty entry of PYTHONPATH put it into the path.
    """
    sys.path[:] = _foreign(sys.path)


def leave_directory() -> None:
    """Work where our packages lie, and let processes that start from here import from there.

    Ray puts the current directory first into the import path of all its processes.
    """
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    kept = [os.path.abspath(entry) for entry in _foreign(entries)]
    os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    os.chdir(ROOT)


def _foreign(entries: Iterable[str]) -> list[str]:
    here = Path.cwd()
    if here == ROOT:
        return list(entries)
    return [entry for entry in entries if (here / entry).resolve() != here]
