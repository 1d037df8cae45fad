"""Prompts, traces and whole workloads of the load harness: exact counts, the same for a seed."""

import json
import re
from collections import Counter
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
from benchmarks.load.traces import Row, Texts
from benchmarks.load.words import Words
from benchmarks.load.workload import workload
from benchmarks.train.problems import is_held_out

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


def test_a_file_of_sharegpt_gives_its_first_questions(tmp_path: Path) -> None:
    rows = [
        {"id": i, "conversations": [
            {"from": "human", "value": f"How many {word}?"},
            {"from": "gpt", "value": f"{word} " * (i + 1)}, {"from": "x", "value": ""},
        ]}
        for i, word in enumerate(("apples", "pears", "plums"))
    ]  # fmt: skip
    file = tmp_path / "share.json"
    file.write_text(json.dumps([*rows, {"id": "4", "conversations": []}]))
    work = made(f"sharegpt:{file}", num=6)
    turns = [session.turns[0] for session in work.sessions]
    asked = {row["conversations"][0]["value"]: row["conversations"][1]["value"] for row in rows}
    assert Counter(turn.prompt for turn in turns) == dict.fromkeys(asked, 2)
    for turn in turns:
        assert turn.num_prompt_tokens == len(ids(str(turn.prompt)))
        assert turn.max_tokens == len(ids(asked[str(turn.prompt)]))
    assert firsts(made(f"sharegpt:{file}", num=3, seed=1, tokenizer=None)) != firsts(work)[:3]
    file.write_text("[]")
    for wrong in (file, tmp_path / "none"):
        with pytest.raises(ValueError, match="sharegpt"):
            made(f"sharegpt:{wrong}")


def test_random_is_vllm_s_name_of_synthetic() -> None:
    (turn,) = made("random", num=1).sessions[0].turns
    assert (turn.num_prompt_tokens, turn.max_tokens) == (1024, 128)
    assert firsts(made("random:20,4", num=3)) == firsts(made("synthetic:20,4", num=3))


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


def test_lengths_are_cut_to_the_room_there_is() -> None:
    cases = [(5000, 20, 180, 20), (5000, 5000, 100, 100), (20, 5000, 20, 100), (9, 9, 9, 9)]
    for num_in, num_out, cut_in, cut_out in cases:
        assert lengths.clip(num_in, num_out, 200) == (cut_in, cut_out)
    assert lengths.clip(5000, 5000, None) == (5000, 5000)


SOURCES = ["problems", "problems:train", "synthetic:1-40,4-8", "shared-prefix:3,48,16,8"]


@pytest.mark.parametrize("source", SOURCES)
def test_a_seed_makes_the_same_bytes_and_another_seed_others(source: str) -> None:
    first = msgspec.json.encode(made(source, "poisson:4", seed=5))
    assert first == msgspec.json.encode(made(source, "poisson:4", seed=5))
    assert first == msgspec.json.encode(msgspec.json.decode(first, type=Workload))
    other = made(source, "poisson:4", seed=6)
    assert other.about["digest"] != msgspec.json.decode(first)["about"]["digest"]
    assert not set(map(str, firsts(made(source, seed=5)))) & set(map(str, firsts(other)))


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
    assert (timed.about["sessions_per_s"], timed.about["exact"]) == (pytest.approx(5), True)
    assert timed.about["prompt_tokens"] == {"sum": 400, "mean": 8, "min": 8, "p50": 8, "max": 8}


def test_problems_are_held_out_ones_and_distinct() -> None:
    texts = firsts(made("problems", num=30, tokenizer=None))
    assert len(set(texts)) == 30
    assert all(is_held_out(text) for text in texts)
    assert not any(is_held_out(text) for text in firsts(made("problems:train", num=30)))
    turn = made("problems").sessions[0].turns[0]
    told = turn.max_tokens, turn.extra, turn.num_prompt_tokens
    assert told == (200, {}, len(ids(str(turn.prompt))))


@pytest.mark.parametrize("length", ["1", "17", "512", "1-300"])
def test_synthetic_prompts_have_exactly_their_tokens(length: str) -> None:
    for turn in (session.turns[0] for session in made(f"synthetic:{length},9").sessions):
        assert isinstance(turn.prompt, str)
        assert turn.prompt == turn.prompt.strip()  # templates may strip it
        assert len(ids(turn.prompt)) == turn.num_prompt_tokens
        assert length == "1-300" or turn.num_prompt_tokens == int(length)
        assert (turn.max_tokens, turn.extra) == (9, {"ignore_eos": True, "min_tokens": 9})


def test_pages_are_shared_by_groups_and_by_nobody_else() -> None:
    own = [tuple(ids(text)) for text in firsts(made("synthetic:64,4", num=500))]
    assert len({prompt[:PAGE] for prompt in own}) == 500
    prompts = [tuple(ids(text)) for text in firsts(made("shared-prefix:4,48,16,8", num=800))]
    assert {len(prompt) for prompt in prompts} == {64}
    groups = Counter(prompt[:48] for prompt in prompts)
    assert len(groups) == 4
    assert len({prompt[48:] for prompt in prompts}) == 800
    assert all(num / 800 == pytest.approx(0.25, abs=0.06) for num in groups.values())


def test_a_bounded_model_shortens_prompts_and_ends_conversations(tmp_path: Path) -> None:
    work = made("synthetic:lognormal(400,1),normal(200,50)", num=200, max_len=512)
    for turn in (session.turns[0] for session in work.sessions):
        assert turn.num_prompt_tokens + turn.max_tokens + 32 <= 512
    row: dict[str, Any] = {"session_id": "a", "input_length": 100, "output_length": 32}
    source = trace(tmp_path / "long", row | {"timestamp": 0}, *[row | {"delay": 1000}] * 8)
    work = made(source, num=None, max_len=512)
    assert {len(session.turns) for session in work.sessions} == {3}


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
    prompt, num = Texts(words, Options(), 0).make(Row("here", num_in=300, key=1), 300, "")
    assert num == words.count(prompt)  # a trace's text is not mended but truly counted
    assert (num == 300) == words.is_additive
    long = words.fixed((1, -2, 3), 70)  # fewer words are the beginning of more
    assert all(words.fixed((1, -2, 3), num) == long[:num] for num in range(0, 70, 3))
    assert words.fixed((1, 2), 30) != words.fixed((2, 1), 30)


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
    assert 45 < rows[-1]["timestamp"] / 1000 < 75
    blocks = [block for row in rows for block in row["hash_ids"]]
    assert 0.3 < 1 - len(set(blocks)) / len(blocks) < 0.7, "some are shared"


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
    assert str(turns[2].prompt).startswith(str(turns[1].prompt))
    assert len(made(source, duration_s=2.0).sessions) == 2
    assert len(made(source, num=1).sessions) == 1
    other = made(source, "constant:10")
    assert [each.start_s for each in other.sessions] == [0, 0.1, 0.2]
    assert firsts(other) == firsts(made(source))
    assert len(made(source, "constant:10", duration_s=0.2).sessions) == 2
    assert made(source, max_requests=2).num_requests == 2


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
    text = made(trace(tmp_path / "t", *rows[:3:2]), num=None, chat=False).sessions[0]
    assert text.turns[1].prompt.startswith(" "), "a text goes on after a space"
    assert len(ids("".join(turn.prompt for turn in text.turns))) == 50
    with pytest.raises(ValueError, match=":4: completions take no messages"):
        made(trace(tmp_path / "t", *rows), num=None, chat=False)


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


ROW = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
WRONG_ROWS: list[tuple[dict[str, Any], str]] = [
    (ROW | {"hash_ids": [1]}, ":2: hash_ids has 1 blocks for input_length 600"),
    (ROW | {"hash_ids": [1, "2"]}, ":2: Expected `int`, got `str` - at `$.hash_ids[1]`"),
    (ROW | {"timestamp": -1}, ":2: Expected `float` >= 0.0 - at `$.timestamp`"),
    (ROW | {"timestamp": None}, ":2: has no start time, others have"),
    ({"timestamp": 1, "output_length": 3}, ":2: needs one of input_length"),
    (ROW | {"text_input": "x"}, ":2: needs one of input_length"),
    (ROW | {"payload": {}}, ":2: Object contains unknown field `payload`"),
    ({"timestamp": 1, "messages": [{"role": "u"}], "session_id": "s"}, "message_mode delta"),
    ({"timestamp": 1, "messages": [{}]}, "objects with a role"),
    ({"session_id": "s", "timestamp": 3, "text_input": "x"}, ":2: a later turn"),
]


@pytest.mark.parametrize(("row", "message"), WRONG_ROWS)
def test_wrong_rows_are_refused_by_file_line_and_field(row, message, tmp_path) -> None:
    source = trace(tmp_path / "bad", ROW | {"session_id": "s"}, row)
    with pytest.raises(ValueError, match=re.escape(message)):
        made(source, num=None)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("mooncake", "\n", "has no request"),
        ("mooncake", '\n{"a"\n', ":2: Input data was truncated"),
        ("burstgpt", "Timestamp,Request tokens\n1,2\n", ":2: Object missing required field"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\ninf,2,3\n", ":2: Expected"),
    ],
)
def test_files_that_are_no_traces_are_refused(kind: str, text: str, message: str, tmp_path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        made(f"{kind}:{tmp_path / 'x'}")
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=message):
        made(f"{kind}:{tmp_path / 'x'}")


@pytest.mark.parametrize(
    ("source", "asked", "message"),
    [
        ("books", {}, "source: 'books' is none of problems, synthetic"),
        ("problems:new", {}, "problems: 'new'"),
        ("synthetic:12", {}, "synthetic: the form is synthetic:IN,OUT"),
        ("synthetic:x,12", {}, "synthetic: IN: 'x' is no whole number"),
        ("synthetic:12,0", {}, "synthetic: OUT: must be at least 1"),
        ("synthetic:9-3,12", {}, "synthetic: IN: must be at least 9"),
        ("synthetic:normal(3),12", {}, "synthetic: IN: normal takes two numbers"),
        ("synthetic:gauss(3,1),12", {}, "synthetic: IN: 'gauss(3,1)' is not normal"),
        ("shared-prefix:0,9,9,9", {}, "shared-prefix: GROUPS"),
        ("shared-prefix:2,500,9,9", {"max_len": 512}, "shared-prefix: PREFIX"),
        ("synthetic:9,9", {"arrivals": "poison:4"}, "arrivals: 'poison:4' is none of"),
        ("synthetic:9,9", {"max_len": 20}, "max_len: 20 leaves no room"),
        ("synthetic:9,9", {"block_size": 0}, "block_size: must be at least 1"),
        ("synthetic:9,9", {"arrivals": "poisson:0.001", "duration_s": 0.1}, "nothing to send"),
        ("synthetic:9,9", {"time_scale": 0.0}, "time_scale: must be above 0"),
        ("synthetic:8,4", {"num": None, "duration_s": 10}, "a closed loop needs their number"),
        ("synthetic:8,4", {"num": 0}, "sessions: must be at least 1"),
        ("synthetic:8,4", {"tokenizer": Tokenizer(models.BPE())}, "tokenizer: only 0 words"),
        ("synthetic:8,4", {"tokenizer": None}, "synthetic: needs a tokenizer"),
        (f"mooncake:{TRACE}", {"tokenizer": None, "block_size": 64}, "which need a tokenizer"),
    ],
)
def test_wrong_arguments_are_refused_by_the_name_of_the_part(source, asked, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made(source, **asked)
