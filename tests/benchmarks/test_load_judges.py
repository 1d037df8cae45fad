"""The comparison with aiperf: how figures are pooled, and the model that is served for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.judges.agree import Replay, compared
from benchmarks.judges.served import INSIDE, dummy_model, enter_namespace
from benchmarks.load import tokens
from worker.models.config import read_model_spec


def replay(ttft_ms: list[float], wall_s: float) -> Replay:
    names = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "requests_per_s", "tokens_per_s")
    own = {name: ttft_ms[0] for name in names}
    return Replay(own, ttft_ms, [2 * value for value in ttft_ms], 10 * len(ttft_ms), wall_s, {})


def test_figures_of_all_requests_and_of_rounds() -> None:
    """The median of the three rounds' p50 is 10, the p50 of their seven requests 1."""
    rounds = [replay([1.0] * 5, 5.0), replay([10.0], 1.0), replay([10.0], 2.0)]
    found = compared({"aiperf": rounds, "ours": [replay([2.0] * 7, 8.0)]})
    assert found["ttft_p50"]["pooled"] == {"aiperf": 1.0, "ours": 2.0}
    assert found["ttft_p50"]["ratio_pooled"] == 2.0
    assert found["ttft_p50"]["median"] == {"aiperf": 10.0, "ours": 2.0}
    assert found["ttft_p50"]["ratio"] == 0.2
    assert found["requests_per_s"]["pooled"] == {"aiperf": 7 / 8, "ours": 7 / 8}
    assert found["tokens_per_s"]["ratio_pooled"] == 1.0
    assert found["ttft_p99"]["rounds"]["aiperf"] == [1.0, 10.0, 10.0]


def test_a_dummy_model_is_of_the_size_asked_for(tmp_path: Path) -> None:
    arguments = dummy_model("256x3", tmp_path / "dummy")
    assert arguments == ["--model", str(tmp_path / "dummy"), "--set", "model.load_format=dummy"]
    spec = read_model_spec(tmp_path / "dummy")
    assert (spec.hidden_size, spec.num_layers) == (256, 3)
    assert spec.num_heads * spec.head_dim == spec.hidden_size
    assert tokens.load(arguments[1]), "its tokenizer is beside it"


@pytest.mark.parametrize("size", ["512", "100x2", "256x0"])
def test_a_size_that_makes_no_model_is_refused(tmp_path: Path, size: str) -> None:
    with pytest.raises(ValueError, match=r"--dummy|unpack"):
        dummy_model(size, tmp_path / "dummy")


def test_without_iproute2_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INSIDE, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=f"no `ip` .*{INSIDE}=1"):
        enter_namespace("benchmarks.interference")
