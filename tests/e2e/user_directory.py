"""A directory of a user's, with files that are called as our packages are, to run `serve` in."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from tests.e2e.harness import REPOSITORY, Serve

IMPORTED = "was imported"
THEIRS = f"raise SystemExit(f'{{__file__}} {IMPORTED}')\n"
MODEL = "model"  # in that directory


def run_kvlane_there(serve: Serve, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` becomes the installed command, beside packages of all our names."""
    (root / "bin").mkdir()
    serve.program = (sys.executable, _installed_command(root / "bin"))
    serve.directory = _filled(root / "theirs", cluster_is_package=True)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def run_module_there(serve: Serve, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` stays `python -m cluster`: a package `cluster` of the user's is what that asks for,
    so there is none. An empty entry of PYTHONPATH is the current directory, too."""
    serve.directory = _filled(root / "theirs", cluster_is_package=False)
    monkeypatch.setenv("PYTHONPATH", f":{REPOSITORY}")


def _installed_command(directory: Path) -> str:
    """The script that `pip install` writes for `kvlane`."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["kvlane"].partition(":")
    script = directory / "kvlane"
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return str(script)


def _filled(directory: Path, *, cluster_is_package: bool) -> Path:
    (directory / "cluster").mkdir(parents=True)
    names = ["worker.py", "router.py", "ray.py", "cluster/config.py", "cluster/serve.py"]
    for name in [*names, "cluster/__init__.py"] if cluster_is_package else names:
        (directory / name).write_text(THEIRS)
    (directory / MODEL).symlink_to(REPOSITORY / "worker" / "assets" / "tiny")
    return directory
