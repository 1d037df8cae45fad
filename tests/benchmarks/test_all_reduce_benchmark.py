"""benchmarks.all_reduce on the CPU: two processes, our kernels under the interpreter, and gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import all_reduce
from tests.support.interpreted import INTERPRETED

if INTERPRETED:

    @pytest.mark.whole  # tests/unit/test_all_reduce.py has its sums and its processes
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_every_way_sums_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        argv = ["all_reduce", "--device", "cpu", "--calls", "1", "--replays", "1"]
        monkeypatch.setattr(sys, "argv", [*argv, "--sizes", "8192", "--json", str(path)])
        all_reduce.main()
        report = json.loads(path.read_text())
        (size,), (norm,) = report["sizes"], report["norms"]
        assert size["ways"].keys() == size["errors"].keys() == {"one shot", "two shots", "gloo"}
        assert norm["ways"].keys() == norm["errors"].keys() == {"gloo", "fused"}
        assert max(*size["errors"].values(), *norm["errors"].values()) < 2 * all_reduce.ROUNDING

else:

    def test_a_cpu_takes_the_interpreter(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["all_reduce", "--device", "cpu"])
        with pytest.raises(SystemExit):
            all_reduce.main()
        assert "TRITON_INTERPRET=1" in capsys.readouterr().err
