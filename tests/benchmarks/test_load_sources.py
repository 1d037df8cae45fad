"""Prompts, traces and whole workloads of the load harness: exact counts, the same for a seed."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.random import default_rng
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks.load import lengths
from benchmarks.load.prompts import Options
from benchmarks.load.records import Workload
from benchmarks.load.words import Words
from benchmarks.load.workload import workload

TINY = Tokenizer.from_file("worker/assets/tiny/tokenizer.json")
TRACE = Path("benchmarks/load/traces/tiny.mooncake.jsonl")
PAGE = 16  # tokens


def made(source: str, arrivals: str | None = None, **options: Any) -> Workload:
    asked: dict[str, Any] = {"duration_s": None, "seed": 0, "tokenizer": TINY}
    asked |= {name: options.pop(name) for name in [*asked] if name in options}
    num = options.pop("num", 20)
    return workload(source, arrivals, num_sessions=num, options=Options(**options), **asked)


def ids(text: str) -> list[int]:
    return TINY.encode(text, add_special_tokens=False).ids


def firsts(work: Workload) -> list[Any]:
    return [session.turns[0].prompt for session in work.sessions]


def trace(path: Path, *rows: Mapping[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"mooncake:{path}"


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [
        ("512", 512, 512, 512),
        ("128-1024", 576, 128, 1024),
        ("normal(512,100)", 512, 1, 1200),
        ("lognormal(512,0.5)", 512 * np.exp(0.125), 1, 10_000),
        ("64+normal(100,9)+8-10", 173, 72 + 1, 300),
    ],
)
def test_lengths_follow_their_law(text: str, mean: float, low: int, high: int) -> None:
    rng, draw = default_rng(4), lengths.length(text, "IN")
    drawn = np.array([draw(rng) for _ in range(20_000)])
    assert low <= drawn.min()
    assert drawn.max() <= high
    assert drawn.mean() == pytest.approx(mean, abs=1e-9 + 4 * drawn.std() / len(drawn) ** 0.5)
    if text == "128-1024":
        assert {drawn.min(), drawn.max()} == {low, high}


@pytest.mark.parametrize("source", ["problems", "synthetic:1-40,4-8", "shared-prefix:3,48,16,8"])
def test_a_seed_makes_the_same_bytes_and_another_seed_others(source: str) -> None:
    first, again, other = (made(source, "poisson:4", seed=seed) for seed in (5, 5, 6))
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    assert not set(map(str, firsts(first))) & set(map(str, firsts(other)))


def test_start_times_and_prompts_do_not_depend_on_each_other() -> None:
    base = made("synthetic:16,4", "poisson:4")
    other = made("shared-prefix:2,16,16,4", "poisson:4")
    assert firsts(base) == firsts(made("synthetic:16,4", "poisson:9"))
    assert [s.start_s for s in base.sessions] == [s.start_s for s in other.sessions]
    closed = made("synthetic:16,4")
    assert firsts(closed) == firsts(base)
    assert {session.start_s for session in closed.sessions} == {None}
    timed = made("synthetic:8,4", "constant:5", num=None, duration_s=10)
    assert timed.about["num_requests"] == timed.num_requests == 50
    assert timed.about["prompt_tokens"] == {"sum": 400, "mean": 8, "min": 8, "p50": 8, "max": 8}


@pytest.mark.parametrize("length", ["1", "17", "512", "1-300"])
def test_synthetic_prompts_have_exactly_their_tokens(length: str) -> None:
    for turn in (session.turns[0] for session in made(f"synthetic:{length},9").sessions):
        assert isinstance(turn.prompt, str)
        assert turn.prompt == turn.prompt.strip()  # templates may strip it
        assert len(ids(turn.prompt)) == turn.num_prompt_tokens
        assert length == "1-300" or turn.num_prompt_tokens == int(length)
        assert (turn.max_tokens, turn.extra) == (9, {"ignore_eos": True, "min_tokens": 9})


@pytest.mark.parametrize(
    "split",
    [pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel(add_prefix_space=False), None],
    ids=["metaspace", "bytes", "none"],  # none: merges run across spaces
)
def test_other_tokenizers_get_exact_prompts_too(split: Any) -> None:
    tokenizer, plain, rng = Tokenizer(models.BPE()), Words(TINY), default_rng(0)
    if split is not None:
        tokenizer.pre_tokenizer = split
    texts = [" ".join(plain.stream(rng, 12)) for _ in range(400)]
    texts += [word for _ in range(400) for word in plain.stream(rng, 1)]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1200, show_progress=False))
    words = Words(tokenizer)
    assert words.is_additive == (split is not None)
    for num in (1, 5, 64, 200):
        text = words.text(rng, num)
        assert words.count(text) == num
        assert words.count(f"{text} {words.text(rng, 30, after=text)}") == num + 30


def test_the_bundled_trace_fits_the_tiny_model_and_replays_exactly() -> None:
    work = made(f"mooncake:{TRACE}", num=None, block_size=64)
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    seen: dict[int, list[int]] = {}
    for row, session in zip(rows, work.sessions, strict=True):
        (turn,) = session.turns
        assert 16 <= row["output_length"] <= min(96, 1024 - 32 - row["input_length"])
        assert session.start_s == row["timestamp"] / 1000
        assert turn.max_tokens == row["output_length"] == turn.extra["min_tokens"]
        found = ids(turn.prompt)
        assert len(found) == row["input_length"] == turn.num_prompt_tokens
        # the same block is the same text wherever it occurs, but for a prompt's first token, which
        # has no space before it
        for index, block in enumerate(row["hash_ids"][:-1]):
            part = found[64 * index + 1 : 64 * index + 64]
            assert seen.setdefault(block, part) == part
    assert len(set(map(tuple, seen.values()))) == len(seen), "other blocks are other texts"


def test_scales_shrink_a_trace_and_its_times_can_be_kept_cut_or_replaced(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 4000, "input_length": 6758, "output_length": 50, "hash_ids": [*range(14)]},
        {"timestamp": 5000, "input_length": 7322, "output_length": 0, "hash_ids": [*range(15)]},
        {"timestamp": 6500, "input_length": 90_000, "output_length": 5, "hash_ids": [*range(176)]},
    ]
    source = trace(tmp_path / "big", *rows)
    work = made(source, input_scale=1 / 64, time_scale=0.5, max_len=512)
    turns = [session.turns[0] for session in work.sessions]
    assert [session.start_s for session in work.sessions] == [0, 0.5, 1.25]
    assert [len(ids(turn.prompt)) for turn in turns] == [106, 114, 475]
    assert [turn.max_tokens for turn in turns] == [50, 1, 5]
    assert turns[1].prompt.startswith(turns[0].prompt)  # 13 blocks, and the same next one
    assert len(made(source, duration_s=2.0).sessions) == 2
    other = made(source, "constant:10")
    assert [each.start_s for each in other.sessions] == [0, 0.1, 0.2]
    assert firsts(other) == firsts(made(source))


def test_mooncake_sessions_and_literal_prompts_of_aiperf(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 30, "output_length": 4},
        {"timestamp": 10.5, "text_input": "How many?", "output_length": 5, "extra": {"top_k": 1}},
        {"session_id": "a", "delay": 1500, "input_length": 20, "output_length": 6},
        {"timestamp": 20, "messages": messages, "tools": [{"type": "function"}]},
    ]
    first, second, third = made(trace(tmp_path / "t", *rows), num=None).sessions
    assert [turn.num_prompt_tokens for turn in first.turns] == [30, 20]
    assert [turn.think_s for turn in first.turns] == [0.0, 1.5]
    assert (second.start_s, second.turns[0].prompt) == (0.0105, "How many?")
    assert (second.turns[0].max_tokens, second.turns[0].extra) == (5, {"top_k": 1})
    assert (third.turns[0].prompt, third.turns[0].max_tokens) == (messages, 200)
    assert third.turns[0].extra == {"tools": [{"type": "function"}]}


def test_burstgpt_rows_keep_times_and_lengths_and_lose_failures(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(
        "Timestamp,Session ID,Model,Request tokens,Response tokens\n"
        "5,s1,m,40,18\n6,s3,m,100,0\n7,s2,m,60,9\n9,s1,m,90,7\n"
    )
    work = made(f"burstgpt:{path}", num=None)
    assert [session.start_s for session in work.sessions] == [0, 2, 4]
    turns = [session.turns[0] for session in work.sessions]
    assert [len(ids(turn.prompt)) for turn in turns] == [40, 60, 90]
    assert [turn.max_tokens for turn in turns] == [18, 9, 7]
    one, two, three = firsts(work)
    assert three.startswith(one + " "), "rows of one session begin alike"
    assert two.split()[:PAGE] != one.split()[:PAGE]


@pytest.mark.parametrize(
    ("source", "asked", "message"),
    [
        ("books", {}, "source: 'books' is none of problems, synthetic"),
        ("synthetic:12", {}, "synthetic: the form is synthetic:IN,OUT"),
        ("synthetic:9-3,12", {}, "synthetic: IN: must be at least 9"),
        ("shared-prefix:2,500,9,9", {"max_len": 512}, "shared-prefix: PREFIX"),
        ("synthetic:9,9", {"arrivals": "poison:4"}, "arrivals: 'poison:4' is none of"),
        ("synthetic:9,9", {"arrivals": "poisson:0.001", "duration_s": 0.1}, "nothing to send"),
        ("synthetic:8,4", {"num": None, "duration_s": 10}, "a closed loop needs their number"),
        (f"mooncake:{TRACE}", {"block_size": 512}, ":1: hash_ids has"),
    ],
)
def test_wrong_arguments_are_refused_by_the_name_of_the_part(source, asked, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made(source, **asked)
