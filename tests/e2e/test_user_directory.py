"""`serve` in a directory with files of the user's that are called as our packages are."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from tests.e2e.harness import REPOSITORY, Serve
from tests.e2e.test_lifecycle import ask

THEIRS = "raise SystemExit(f'{__file__} was imported')\n"


def installed_command(directory: Path) -> str:
    """The script that `pip install` writes for `kvlane`."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["kvlane"].partition(":")
    script = directory / "kvlane"
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return str(script)


def fill(directory: Path, *, cluster_is_package: bool) -> None:
    (directory / "cluster").mkdir(parents=True)
    names = ["worker.py", "router.py", "ray.py", "cluster/config.py", "cluster/serve.py"]
    for name in [*names, "cluster/__init__.py"] if cluster_is_package else names:
        (directory / name).write_text(THEIRS)


@pytest.mark.parametrize("how", ["kvlane", "python -m cluster"])
def test_serve_imports_nothing_from_the_directory_of_the_user(
    how: str, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve.directory = tmp_path / "theirs"
    if how == "kvlane":
        (tmp_path / "bin").mkdir()
        serve.program = (sys.executable, installed_command(tmp_path / "bin"))
        fill(serve.directory, cluster_is_package=True)
        monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    else:
        # A package `cluster` of the user's is what `python -m cluster` asks for, so not that. An
        # empty entry is the current directory, too.
        fill(serve.directory, cluster_is_package=False)
        monkeypatch.setenv("PYTHONPATH", f":{REPOSITORY}")
    (serve.directory / "model").symlink_to(REPOSITORY / "worker" / "assets" / "tiny")
    serve.start("--model", "model", "--set", "model.served_name=tiny").wait_ready()
    assert ask(serve)["choices"]
    done = serve.command("status")
    assert done.returncode == 0, done.stderr
    assert "was imported" not in serve.output
