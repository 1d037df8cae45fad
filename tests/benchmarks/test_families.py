"""`python -m benchmarks.families`: what it says, and that every architecture has a case."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import families
from worker.config.checkpoint.families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_architecture_that_is_served_has_a_case() -> None:
    assert not families.untested()
    for path in families.ELSEWHERE.values():
        assert (Path(__file__).parents[2] / path).exists()


def test_what_differs_or_nobody_knows_fails(tmp_path, capsys, monkeypatch) -> None:
    rows: Any = FAMILIES
    right, file = FAMILIES["Gemma2ForCausalLM"], tmp_path / "found.json"
    wrong = replace(right, layers=replace(right.layers, root_scale=False))
    monkeypatch.setitem(rows, "Gemma2ForCausalLM", wrong)
    assert families.main(["gemma2", "gemma3-images", "--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert "Gemma3ForConditionalGeneration" in said
    assert "1 of 2 as transformers computes them" in said
    found = json.loads(file.read_text())["cases"]
    assert found["gemma2"]
    assert not found["gemma3-images"]
    with pytest.raises(SystemExit):
        families.main(["gemma1"])
