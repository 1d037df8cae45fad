"""The comparison with aiperf, without aiperf: what both replay, and what is compared."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.judges import aiperf
from benchmarks.judges.agree import FIGURES, compared, written_out
from benchmarks.judges.served import INSIDE, enter_namespace
from benchmarks.load import prompts, words
from benchmarks.load.workload import workload


def test_compared_are_the_medians_of_the_rounds() -> None:
    rounds = [dict.fromkeys(FIGURES, value) for value in (1.0, 10.0, 12.0)]
    found = compared({"aiperf": rounds, "ours": [dict.fromkeys(FIGURES, 2.0)]})
    assert tuple(found) == FIGURES
    assert found["ttft_p50"]["median"] == {"aiperf": 10.0, "ours": 2.0}
    assert found["ttft_p50"]["ratio"] == 0.2
    assert found["ttft_p99"]["rounds"]["aiperf"] == [1.0, 10.0, 12.0]


def test_figures_of_aiperf_have_the_names_of_ours() -> None:
    spread = {"p50": 2.0, "p99": 3.0, "avg": 2.5}
    summary = {"time_to_first_token": spread, "request_throughput": {"avg": 4.0}}
    found = aiperf.figures(summary)
    assert [found[name] for name in FIGURES] == [2.0, 3.0, 0.0, 0.0, 4.0, 0.0]


def test_both_replay_the_same_texts(tmp_path: Path) -> None:
    trace = "benchmarks/load/traces/tiny.mooncake.jsonl"
    options = Namespace(trace=trace, requests=5, block_size=64, time_scale=2.0)
    path = tmp_path / "text.jsonl"
    assert written_out(options, path) == 5
    sent = []
    for source, how in (
        (trace, prompts.Options(block_size=64, time_scale=2.0)), (path, prompts.Options()),
    ):  # fmt: skip
        work = workload(
            f"mooncake:{source}", None, num_sessions=5, duration_s=None, seed=0,
            tokenizer=words.load("tiny"), options=how,
        )  # fmt: skip
        turns = [(each.start_s, each.turns[0]) for each in work.sessions]
        sent.append([(at_s, turn.prompt, turn.max_tokens) for at_s, turn in turns])
    assert sent[0] == sent[1]


def test_the_tokenizer_lies_where_a_hub_would_have_it(tmp_path: Path) -> None:
    assert aiperf.tokenizer_cache(tmp_path)["HF_HUB_OFFLINE"] == "1"
    (found,) = tmp_path.glob("hub/models--local--tiny/snapshots/*/tokenizer.json")
    assert found.read_bytes() == (aiperf.TINY / "tokenizer.json").read_bytes()


def test_without_iproute2_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INSIDE, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=f"no `ip` .*{INSIDE}=1"):
        enter_namespace("benchmarks.gpu_cluster")
