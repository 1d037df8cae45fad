"""benchmarks.interference: what it sends, what it serves, and its figures by class of request."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from benchmarks.interference import (
    LOADS,
    Row,
    by_class,
    keep,
    kept,
    layout_config,
    main,
    read,
    recorded,
    show,
    write_loads,
)
from benchmarks.judges.served import TINY, make_model
from benchmarks.load.prompts import Options
from benchmarks.load.records import Outcome, Run
from benchmarks.load.workload import workload
from cluster.config import load
from cluster.resolve import with_devices
from tests.benchmarks.load_results import made_up_result

SMALL = TINY / "config.json"
CHAT_GAP_S = {"split": 0.01, "both-256": 0.02}
PROMPT_GAP_S = 0.5
NUM_PIECES = 5
STALL_S = 0.25  # of the last chat


def options(out: Path, **changed: Any) -> Namespace:
    given = {
        "gpus": 2, "model_config": SMALL, "chunk": 512, "kind": "nvlink", "max_num_reqs": 16,
        "chat": "20-40,12", "chats": "constant:4", "prompt": "700,3", "prompts": "poisson:1",
        "duration": 5.0, "seed": 3, "out": out,
    }  # fmt: skip
    return Namespace(**given | changed)


def test_the_same_chats_are_sent_alone_and_beside_prompts(tmp_path: Path) -> None:
    rows = write_loads(options(tmp_path))
    make_model(SMALL, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for name, kinds in (("alone", {"chat"}), ("mixed", {"chat", "prompt"})):
        sent = workload(
            f"mooncake:{tmp_path / name}.jsonl", None, num_sessions=None, duration_s=None, seed=7,
            tokenizer=tokenizer, options=Options(chat=False),
        )  # fmt: skip
        wanted = [row for row in rows if row.type in kinds]
        assert {row.type for row in wanted} == kinds
        turns = [(each.start_s, each.turns[0]) for each in sent.sessions]
        assert [
            (round(1000 * (start_s or 0.0)), turn.num_prompt_tokens, turn.max_tokens)
            for start_s, turn in turns
        ] == [(row.timestamp, row.input_length, row.output_length) for row in wanted]
    assert [row.timestamp for row in rows if row.type == "chat"] == [250 * n for n in range(20)]
    assert {row.type for row in rows[:2]} == {"chat", "prompt"}
    assert recorded(options(tmp_path)) == rows != recorded(options(tmp_path, seed=4))


def test_a_class_that_never_comes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--prompts: poisson:0\.0001 has none"):
        recorded(options(tmp_path, prompts="poisson:0.0001"))


@pytest.mark.parametrize(("num_gpus", "share"), [(0, 0.0), (1, 0.5), (2, 1.0)])
def test_layouts_load_and_use_the_same_devices(num_gpus: int, share: float, tmp_path: Path) -> None:
    given = options(tmp_path, gpus=num_gpus)
    rows = recorded(given)
    found = {}
    for layout in ("split", "both-256"):
        path = tmp_path / f"{layout}.yaml"
        path.write_text(yaml.safe_dump(layout_config(given, tmp_path, layout, rows)))
        found[layout] = with_devices(load(path), has_gpus=num_gpus > 0)
        assert found[layout].decode.num_gpus == share
    split, both = found["split"], found["both-256"]
    assert (split.prefill.replicas, split.decode.replicas, split.prefill.num_gpus) == (1, 1, share)
    assert split.disaggregation.mode == "always"
    assert split.prefill.engine.max_prefill_tokens == 512
    assert (both.prefill.replicas, both.decode.replicas) == (0, 2)
    assert both.disaggregation.mode == "never"
    assert both.decode.engine.max_prefill_tokens == 256
    assert split.model.max_model_len == both.model.max_model_len == 700 + 12 + 64
    with pytest.raises(ValueError, match="'both-x' is neither"):
        layout_config(given, tmp_path, "both-x", rows)


def outcome_of(number: int, row: Row, gap_s: float) -> Outcome:
    """A request whose first piece takes 0.1 s, and the others `gap_s` each."""
    begin = row.timestamp / 1000
    times = [round(begin + 0.1 + gap_s * piece, 6) for piece in range(NUM_PIECES)]
    outcome = Outcome(number, 0, begin, begin, begin, times, times[-1], counted=True)
    outcome.num_output_tokens, outcome.num_prompt_tokens = NUM_PIECES, row.input_length
    return outcome


def measured(out: Path) -> list[Row]:
    """What two layouts would have left in `out`, two runs of each load."""
    rows = write_loads(options(out))
    for layout, chat_gap_s in CHAT_GAP_S.items():
        figures: dict[str, Any] = {"start_s": 50.0}
        for name in LOADS:
            sent = kept(rows, name)
            outcomes = [
                outcome_of(n, row, chat_gap_s if row.type == "chat" else PROMPT_GAP_S)
                for n, row in enumerate(sent)
            ]
            last = next(each for each in reversed(outcomes) if sent[each.session].type == "chat")
            last.chunk_s = [*last.chunk_s[:-1], last.chunk_s[-2] + STALL_S]
            one = Run(outcomes, [], "2026-11-21T10:00:00+00:00", 10.0)
            figures[name] = by_class(made_up_result([one, one]), sent)
        keep(out, layout, figures)
    return rows


def test_figures_are_of_each_class_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = measured(tmp_path)
    told = read(tmp_path)
    assert list(told) == ["split", "both-256"]
    num_chats = sum(row.type == "chat" for row in rows)
    for layout, gap_s in CHAT_GAP_S.items():
        loads = told[layout]
        assert loads["start_s"] == 50.0
        assert sorted(loads["alone"]) == ["chat"]
        for chats in (*loads["alone"]["chat"], *loads["mixed"]["chat"]):
            assert chats["requests"]["served"] == num_chats
            assert chats["latency"]["gaps_s"]["p50"] == pytest.approx(gap_s)
            assert chats["latency"]["gaps_s"]["max"] == pytest.approx(STALL_S)
            assert chats["throughput"]["requests_per_s"] == pytest.approx(num_chats / 10.0)
        for prompts in loads["mixed"]["prompt"]:
            assert prompts["requests"]["served"] == len(rows) - num_chats > 0
            assert prompts["latency"]["gaps_s"]["p50"] == pytest.approx(PROMPT_GAP_S)
    assert show(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    for start, gap_ms in (
        ("split, alone: chats ", "10.00"), ("split, mixed: chats ", "10.00"),
        ("split, mixed: prompts ", "500.0"), ("both-256, mixed: chats ", "20.00"),
    ):  # fmt: skip
        (line,) = (line for line in lines if line.startswith(start))
        assert gap_ms in line.split()


def test_figures_of_other_layouts_stay(tmp_path: Path) -> None:
    measured(tmp_path)
    before = read(tmp_path)
    keep(tmp_path, "both-1024", before["split"])
    keep(tmp_path, "both-256", before["split"])  # as if it had been measured again
    told = read(tmp_path)
    assert list(told) == ["split", "both-256", "both-1024"]
    assert told["split"] == told["both-256"] == told["both-1024"] == before["split"]


def test_show_says_that_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_loads(options(tmp_path))  # of a run that did not get further
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["interference", "show", str(tmp_path)])
    assert main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"error: {tmp_path} has no figures of a layout\n"
    assert sorted(tmp_path.iterdir()) == before


def test_show_wants_a_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["interference", "show"])
    assert main() == 2
    assert "interference show DIR" in capsys.readouterr().err


def test_another_load_than_was_sent_is_refused(tmp_path: Path) -> None:
    write_loads(options(tmp_path))
    write_loads(options(tmp_path))
    with pytest.raises(ValueError, match=r"mixed\.jsonl is another load"):
        write_loads(options(tmp_path, prompt="701,3"))
