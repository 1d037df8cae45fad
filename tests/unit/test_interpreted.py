"""Every test file of Triton kernels, under Triton's interpreter."""

from pathlib import Path

import pytest

from tests.support.interpreted import INTERPRETED, ROOT, WHY, run_interpreted
from worker.ops.jit import HAS_TRITON

TESTS = ROOT / "tests"


def files() -> list[Path]:
    """Those that ask whether the interpreter is chosen."""
    asks = "from tests.support.interpreted import INTERPRETED"
    found = [path for path in sorted(TESTS.rglob("test_*.py")) if asks in path.read_text()]
    return [path for path in found if path != Path(__file__)]


@pytest.mark.skipif(INTERPRETED, reason="is under it")
@pytest.mark.skipif(not HAS_TRITON, reason=WHY)
def test_kernels_under_the_interpreter() -> None:
    """In one process: another would take seconds to import the same."""
    paths = files()
    assert {path.name for path in paths} >= {"test_attention.py", "test_kernels_triton.py"}
    run_interpreted(paths)
