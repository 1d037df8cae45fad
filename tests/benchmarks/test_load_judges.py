"""The comparison with aiperf, without aiperf: what both replay, and what is compared."""

from argparse import Namespace
from pathlib import Path

from benchmarks.judges.agree import FIGURES, compared, written_out
from benchmarks.load import prompts, words
from benchmarks.load.workload import workload


def test_compared_are_the_medians_of_the_rounds() -> None:
    rounds = [dict.fromkeys(FIGURES, value) for value in (1.0, 10.0, 12.0)]
    found = compared({"aiperf": rounds, "ours": [dict.fromkeys(FIGURES, 2.0)]})
    assert tuple(found) == FIGURES
    assert found["ttft_p50"]["median"] == {"aiperf": 10.0, "ours": 2.0}
    assert found["ttft_p50"]["ratio"] == 0.2
    assert found["ttft_p99"]["rounds"]["aiperf"] == [1.0, 10.0, 12.0]


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
