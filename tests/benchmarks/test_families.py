"""`python -m benchmarks.families`: what it says, and that every architecture has a case."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import families
from tests.equivalence import test_models as models
from worker.config.checkpoint.families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_architecture_that_is_served_has_a_case() -> None:
    assert not families.untested()
    for path in families.ELSEWHERE.values():
        assert (Path(__file__).parents[2] / path).exists()


def test_a_family_is_compared_and_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert families.main(["gemma3-images", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "Gemma3ForConditionalGeneration" in said
    assert "1 of 1 as transformers computes them" in said
    (row,) = json.loads(file.read_text())["cases"]
    assert 0 < row["error"] < models.BOUND


def test_what_differs_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Computed otherwise; a case that nobody knows."""
    rows: Any = FAMILIES
    right = FAMILIES["Gemma2ForCausalLM"]
    with monkeypatch.context() as changed:
        wrong = replace(right.layers, root_scale=False)
        changed.setitem(rows, "Gemma2ForCausalLM", replace(right, layers=wrong))
        assert families.main(["gemma2"]) == 1
    assert "0 of 1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        families.main(["gemma1"])
