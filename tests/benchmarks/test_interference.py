"""benchmarks.interference: what it sends, what it serves, and its figures by class of request."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from benchmarks.gpu_cluster import TINY, make_model
from benchmarks.interference import Row, layout_config, main, recorded, write_loads
from benchmarks.interference_figures import (
    figures,
    gaps_over_time,
    parts,
    read_load,
    table,
)
from benchmarks.interference_plot import figure
from benchmarks.load import compare, result
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
            tokenizer=tokenizer, options={"chat": False},
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


def write_results(out: Path) -> list[Row]:
    """What two layouts would have left in `out`, two runs of each load."""
    rows = write_loads(options(out))
    for layout, chat_gap_s in CHAT_GAP_S.items():
        for name in ("alone", "mixed"):
            kept = [row for row in rows if name == "mixed" or row.type == "chat"]
            outcomes = [
                outcome_of(n, row, chat_gap_s if row.type == "chat" else PROMPT_GAP_S)
                for n, row in enumerate(kept)
            ]
            last = next(each for each in reversed(outcomes) if kept[each.session].type == "chat")
            last.chunk_s = [*last.chunk_s[:-1], last.chunk_s[-2] + STALL_S]
            one = Run(outcomes, [], "2026-11-21T10:00:00+00:00", 10.0)
            made = made_up_result([one, one])
            made.workload = {
                "digest": name, "num_sessions": len(kept),
                "prompt_tokens": {"sum": sum(row.input_length for row in kept)},
            }  # fmt: skip
            result.write(out / f"{layout}-{name}.json.gz", made)
        (out / f"{layout}.json").write_text(json.dumps({"start_s": 50.0, "machine": {}}))
    return rows


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "NUM_DRAWS", 50)
    monkeypatch.setattr(compare, "MIN_DRAWS", 50)


@pytest.mark.usefixtures("few_draws")
def test_figures_are_of_each_class_alone(tmp_path: Path) -> None:
    rows = write_results(tmp_path)
    told = figures(tmp_path)
    assert list(told["layouts"]) == ["split", "both-256"]
    num_chats = sum(row.type == "chat" for row in rows)
    for layout, gap_s in CHAT_GAP_S.items():
        loads = told["layouts"][layout]
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
    assert told["compared"]["both-256"]["gaps_p50"]["ratio"] == pytest.approx(2.0)
    assert json.loads((tmp_path / "interference.json").read_text()) == told
    lines = table(told).splitlines()
    assert any("both-256 / split" in line for line in lines)
    assert [line.split()[:3] for line in lines if line.strip().startswith("split")] == [
        ["split", "alone", "10.00"],
        ["split", "mixed", "10.00"],
    ]


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("measured", ["split", "both-256"])
def test_figures_stay_of_a_layout_whose_results_were_left_out(
    measured: str, tmp_path: Path
) -> None:
    write_results(tmp_path)
    before = figures(tmp_path)
    (kept,) = set(CHAT_GAP_S) - {measured}
    for path in tmp_path.glob(f"{kept}*"):
        path.unlink()
    # As if it had been measured again.
    (tmp_path / f"{measured}.json").write_text(json.dumps({"start_s": 60.0, "machine": {}}))
    told = figures(tmp_path)
    assert list(told["layouts"]) == ["split", "both-256"]
    assert told["layouts"][kept] == before["layouts"][kept]
    assert told["layouts"][measured] == before["layouts"][measured] | {"start_s": 60.0}
    assert told["compared"] == before["compared"]
    assert json.loads((tmp_path / "interference.json").read_text()) == told


@pytest.mark.usefixtures("few_draws")
def test_results_win_over_figures_of_before(tmp_path: Path) -> None:
    write_results(tmp_path)
    measured = figures(tmp_path)
    of_split = measured["layouts"]["split"]
    row = {"gaps_p99": {"ratio": 9.0, "interval": [8.0, 10.0]}}
    before = {
        "layouts": {"both-512": of_split, "both-256": of_split},
        "compared": {"both-512": row, "both-256": row},
    }
    (tmp_path / "interference.json").write_text(json.dumps(before))
    told = figures(tmp_path)
    assert list(told["layouts"]) == ["split", "both-256", "both-512"]
    assert told["layouts"] == measured["layouts"] | {"both-512": of_split}
    assert list(told["compared"]) == ["both-256", "both-512"]
    assert told["compared"] == measured["compared"] | {"both-512": row}


def test_show_says_that_there_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_loads(options(tmp_path))  # of a run that did not get further
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["interference", "show", str(tmp_path)])
    assert main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"error: {tmp_path} has neither whole results of a layout nor figures\n"
    assert sorted(tmp_path.iterdir()) == before


def test_show_wants_a_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["interference", "show"])
    assert main() == 2
    assert "interference show DIR" in capsys.readouterr().err


def test_another_load_than_was_sent_is_refused(tmp_path: Path) -> None:
    write_results(tmp_path)
    write_loads(options(tmp_path))
    with pytest.raises(ValueError, match=r"mixed\.jsonl is another load"):
        write_loads(options(tmp_path, prompt="701,3"))
    (tmp_path / "mixed.jsonl").unlink()
    write_loads(options(tmp_path, prompt="701,3"))
    with pytest.raises(ValueError, match=r"mixed\.jsonl is not what split was asked"):
        read_load(tmp_path, "split", "mixed")


def test_a_bin_has_the_longest_gap_that_ended_in_it() -> None:
    outcomes = [
        Outcome(0, 0, 0.0, chunk_s=[0.0, 0.01, 0.04, 0.17]),
        Outcome(1, 0, 0.0, chunk_s=[0.02, 0.045]),
        Outcome(2, 0, 0.0, error="timeout"),
    ]
    times, longest = gaps_over_time(Run(outcomes, [], "", 1.0), 0.05)
    assert times == pytest.approx([0.025, 0.075, 0.125, 0.175])
    assert longest[0] == pytest.approx(0.03)
    assert longest[1:3] == [None, None]
    assert longest[3] == pytest.approx(0.13)


def test_the_plot_shows_each_layout_and_its_prompts(tmp_path: Path) -> None:
    rows = write_results(tmp_path)
    told = figures(tmp_path)
    found = {layout: parts(tmp_path, layout, "mixed") for layout in CHAT_GAP_S}
    runs = {name: (each["chat"].runs[0], each["prompt"].runs[0]) for name, each in found.items()}
    drawn = figure(told, runs)
    gaps = [line for line in drawn.select_traces(row=1, col=1) if line.name.endswith("prompts")]
    medians = [float(line.y[(abs(line.x - 0.301)).argmin()]) for line in gaps]
    assert medians == pytest.approx([1e3 * gap_s for gap_s in CHAT_GAP_S.values()])
    for row in (2, 3):
        (line,) = drawn.select_traces(row=row, col=1)
        assert max(y for y in line.y if y is not None) == pytest.approx(1e3 * STALL_S)
    num_prompts = sum(row.type == "prompt" for row in rows)
    assert len(drawn.layout.shapes) == 2 * num_prompts
    for path in tmp_path.glob("*-mixed.json.gz"):
        path.unlink()
    assert figures(tmp_path) == told
    again = figure(figures(tmp_path), {})
    assert [line.y.tolist() for line in again.select_traces(row=1, col=1)] == [
        line.y.tolist() for line in drawn.select_traces(row=1, col=1)
    ]
