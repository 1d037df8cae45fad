"""What is to come fits into its seam: each patch here adds one such thing to a copy of the tree.

A patch changes rows of files that are there, adds files, and brings its own test, `NAME_check.py`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
COPIED = ("worker", "router", "cluster", "tests")
# Of the product, apart from what is new: a family has a row, its class's defaults, and its scoring.
MAX_CHANGED_FILES, MAX_CHANGED_LINES = 3, 12
PATCHES = sorted(path.stem for path in HERE.glob("*.patch"))


def changed_lines(patch: str) -> dict[str, int]:
    """Lines that a patch adds to or takes from each file of the product that is there already."""
    changed = dict[str, int]()
    for part in re.split(r"^diff --git ", patch, flags=re.M)[1:]:
        name = part.partition(" b/")[2].partition("\n")[0]
        if "\nnew file mode" not in part and not name.startswith("tests/"):
            changed[name] = len(re.findall(r"^[+-](?!\+\+ |-- )", part, flags=re.M))
    return changed


@pytest.mark.parametrize("name", PATCHES)
def test_an_exercise_adds_files_and_rows(name: str) -> None:
    changed = changed_lines((HERE / f"{name}.patch").read_text())
    assert len(changed) <= MAX_CHANGED_FILES, changed
    assert sum(changed.values()) <= MAX_CHANGED_LINES, changed
    applies = ["git", "apply", "--check", str(HERE / f"{name}.patch")]
    subprocess.run(applies, cwd=REPOSITORY, check=True)


@pytest.mark.whole
@pytest.mark.parametrize("name", PATCHES)
def test_an_exercise_passes_its_own_test(name: str, tmp_path: Path) -> None:
    for folder in COPIED:
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)  # with what is compiled already
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    subprocess.run(["git", "apply", str(HERE / f"{name}.patch")], cwd=tmp_path, check=True)
    check = f"tests/exercises/{name}_check.py"
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", check],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
