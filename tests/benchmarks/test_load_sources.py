"""Prompts, traces and whole workloads of the load harness: exact counts, the same for a seed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
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


def made(
    source: str,
    arrivals: str | None = None,
    *,
    num: int | None = 20,
    duration_s: float | None = None,
    seed: int = 0,
    tokenizer: Tokenizer | None = TINY,
    **options: Any,
) -> Workload:
    return workload(
        source,
        arrivals,
        num_sessions=num,
        duration_s=duration_s,
        seed=seed,
        tokenizer=tokenizer,
        options=Options(**options),
    )


def ids(text: str) -> list[int]:
    return TINY.encode(text, add_special_tokens=False).ids


def count(text: str) -> int:
    return len(ids(text))


def content(prompt: str | list[Any]) -> str:
    """All text of a chat prompt; its parts are counted apart, so a newline would add tokens."""
    return prompt if isinstance(prompt, str) else " ".join(part["content"] for part in prompt)


def firsts(work: Workload) -> list[Any]:
    return [session.turns[0].prompt for session in work.sessions]


def first_ids(work: Workload) -> list[tuple[int, ...]]:
    return [tuple(ids(text)) for text in firsts(work)]


def write_rows(path: Path, rows: list[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Lengths


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [
        ("512", 512, 512, 512),
        ("128-1024", 576, 128, 1024),
        ("7-7", 7, 7, 7),
        ("normal(512,100)", 512, 1, 1200),
        ("lognormal(512,0.5)", 512 * np.exp(0.125), 1, 10_000),
        ("64+normal(100,9)+8-10", 173, 72 + 1, 300),
    ],
)
def test_lengths_follow_their_law(text: str, mean: float, low: int, high: int) -> None:
    rng = default_rng(4)
    draw = lengths.length(text, "IN")
    found = np.array([draw(rng) for _ in range(20_000)])
    assert low <= found.min()
    assert found.max() <= high
    assert found.mean() == pytest.approx(mean, abs=1e-9 + 4 * found.std() / len(found) ** 0.5)
    if "-" in text and "+" not in text:
        assert {found.min(), found.max()} == {low, high}
    if text.startswith("lognormal"):
        assert np.median(found) == pytest.approx(512, rel=0.02)


def test_lengths_are_cut_to_the_room_there_is() -> None:
    assert lengths.clip(5000, 5000, None) == (5000, 5000)
    assert lengths.clip(100, 100, 200) == (100, 100)
    assert lengths.clip(5000, 20, 200) == (180, 20)
    assert lengths.clip(5000, 5000, 200) == (100, 100)
    assert lengths.clip(20, 5000, 200) == (20, 100)
    assert lengths.clip(1, 1, 2) == (1, 1)


# Prompt sources


@pytest.mark.parametrize(
    "source",
    [
        "problems",
        "problems:train",
        "synthetic:1-40,4-8",
        "shared-prefix:3,48,16,8",
    ],
)
def test_a_seed_makes_the_same_bytes_and_another_seed_others(source: str) -> None:
    first = msgspec.json.encode(made(source, "poisson:4", seed=5))
    assert first == msgspec.json.encode(made(source, "poisson:4", seed=5))
    work = msgspec.json.decode(first, type=Workload)
    assert msgspec.json.encode(work) == first
    other = made(source, "poisson:4", seed=6)
    assert not set(map(str, firsts(work))) & set(map(str, firsts(other)))
    assert work.about["digest"] != other.about["digest"]


def test_start_times_and_prompts_do_not_depend_on_each_other() -> None:
    base = made("synthetic:16,4", "poisson:4")
    same_prompts = made("synthetic:16,4", "poisson:9")
    same_times = made("shared-prefix:2,16,16,4", "poisson:4")
    assert firsts(base) == firsts(same_prompts)
    assert [s.start_s for s in base.sessions] == [s.start_s for s in same_times.sessions]
    closed = made("synthetic:16,4")
    assert firsts(closed) == firsts(base)
    assert {session.start_s for session in closed.sessions} == {None}


def test_problems_are_held_out_ones_and_distinct() -> None:
    work = made("problems", num=30, tokenizer=None)
    assert len(set(firsts(work))) == 30
    assert all(is_held_out(text) for text in firsts(work))
    assert not any(is_held_out(text) for text in firsts(made("problems:train", num=30)))
    turn = made("problems").sessions[0].turns[0]
    assert (turn.max_tokens, turn.extra) == (200, {})
    assert turn.num_prompt_tokens == count(content(turn.prompt))


@pytest.mark.parametrize("length", ["1", "2", "17", "512", "1-300"])
def test_synthetic_prompts_have_exactly_their_tokens(length: str) -> None:
    for turn in (session.turns[0] for session in made(f"synthetic:{length},9").sessions):
        assert isinstance(turn.prompt, str)
        assert turn.prompt == turn.prompt.strip()  # templates may strip it
        assert count(turn.prompt) == turn.num_prompt_tokens
        assert length == "1-300" or turn.num_prompt_tokens == int(length)
        assert (turn.max_tokens, turn.extra) == (9, {"ignore_eos": True, "min_tokens": 9})


def test_no_two_synthetic_prompts_share_a_page() -> None:
    work = made("synthetic:64,4", num=500)
    assert len({prompt[:PAGE] for prompt in first_ids(work)}) == 500


def test_prefixes_are_shared_within_groups_alike() -> None:
    prompts = first_ids(made("shared-prefix:4,48,16,8", num=800))
    assert {len(prompt) for prompt in prompts} == {64}
    groups = Counter(prompt[:48] for prompt in prompts)
    assert len(groups) == 4
    assert len({prompt[48:] for prompt in prompts}) == 800
    assert all(num / 800 == pytest.approx(0.25, abs=0.06) for num in groups.values())


def test_a_bounded_model_shortens_prompts_and_ends_conversations(tmp_path: Path) -> None:
    work = made("synthetic:lognormal(400,1),normal(200,50)", num=200, max_len=512)
    for turn in (session.turns[0] for session in work.sessions):
        assert turn.num_prompt_tokens + turn.max_tokens + 32 <= 512
        assert count(turn.prompt) == turn.num_prompt_tokens
    turn: dict[str, Any] = {"session_id": "a", "input_length": 100, "output_length": 32}
    rows = [turn | {"timestamp": 0}, *[turn | {"delay": 1000}] * 8]
    work = made(f"mooncake:{write_rows(tmp_path / 'long.jsonl', rows)}", num=None, max_len=512)
    assert {len(session.turns) for session in work.sessions} == {3}
    with pytest.raises(ValueError, match="shared-prefix: PREFIX"):
        made("shared-prefix:2,500,9,9", max_len=512)


# Words


def test_fewer_words_are_the_beginning_of_more() -> None:
    words = Words(TINY)
    for num in range(0, 70, 3):
        assert words.fixed((1, -2, 3), num) == words.fixed((1, -2, 3), 70)[:num]
    assert words.fixed((1, 2), 30) != words.fixed((2, 1), 30)


SPLITS: dict[str, Any] = {
    "metaspace": pre_tokenizers.Metaspace(),
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "none": None,  # merges run across spaces
}


@pytest.mark.parametrize("split", SPLITS)
def test_other_tokenizers_get_exact_prompts_too(split: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    if SPLITS[split]:
        tokenizer.pre_tokenizer = SPLITS[split]
    plain = Words(TINY)
    rng = default_rng(0)
    texts = [" ".join(plain.stream(rng, 12)) for _ in range(400)]
    texts += [word for _ in range(400) for word in plain.stream(rng, 1)]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1200, show_progress=False))
    words = Words(tokenizer)
    assert words.is_additive == (split != "none")
    for num in (1, 5, 64, 200):
        text = words.text(rng, num)
        assert words.count(text) == num
        assert words.count(f"{text} {words.text(rng, 30, after=text)}") == num + 30


class Merging(Words):
    """Sees two neighbours of the same first letter as one token less, as merges would."""

    def ids(self, text: str) -> list[int]:
        words = text.split(" ")
        joined = sum(a[:1] == b[:1] for a, b in pairwise(words))
        return super().ids(text)[joined:]


def test_texts_are_mended_until_they_have_their_tokens() -> None:
    words = Merging(TINY)
    assert not words.is_additive
    rng = default_rng(2)
    for num in (1, 2, 40, 400):
        text = words.text(rng, num)
        assert words.count(text) == num
        assert words.count(f"{text} {words.text(rng, num, after=text)}") == 2 * num
    row = Row("here", num_in=300, key=1)
    prompt, num = Texts(words, Options(), 0).make(row, 300, "")
    assert num == words.count(prompt) < 300  # a trace's text is not mended but truly counted


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer: only 0 words"):
        Words(Tokenizer(models.BPE()))


# Traces


def test_the_bundled_trace_replays_exactly() -> None:
    work = made(f"mooncake:{TRACE}", num=None, block_size=64)
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    assert len(work.sessions) == len(rows) == 120
    found_ids: list[list[int]] = []
    for row, session in zip(rows, work.sessions, strict=True):
        (turn,) = session.turns
        assert session.start_s == row["timestamp"] / 1000
        assert turn.max_tokens == row["output_length"] == turn.extra["min_tokens"]
        found = TINY.encode(turn.prompt).ids
        assert len(found) == row["input_length"] == turn.num_prompt_tokens
        found_ids.append(found)
    for row, other, a, b in zip(rows, rows[1:], found_ids, found_ids[1:], strict=False):
        same = 0
        for x, y in zip(row["hash_ids"], other["hash_ids"], strict=False):
            if x != y:
                break
            same += 1
        assert a[: 64 * same] == b[: 64 * same]
        assert a[64 * same : 64 * same + PAGE] != b[64 * same : 64 * same + PAGE]
    # the same block is the same text wherever it occurs, but for a prompt's first token, which
    # has no space before it
    seen: dict[int, list[int]] = {}
    for row, found in zip(rows, found_ids, strict=True):
        for index, block in enumerate(row["hash_ids"][:-1]):
            part = found[64 * index + 1 : 64 * index + 64]
            assert seen.setdefault(block, part) == part


def test_the_bundled_trace_fits_the_tiny_model_and_shares_blocks() -> None:
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    assert all(row["input_length"] + row["output_length"] + 32 <= 1024 for row in rows)
    assert all(16 <= row["output_length"] <= 96 for row in rows)
    assert 45 < rows[-1]["timestamp"] / 1000 < 75
    blocks = [block for row in rows for block in row["hash_ids"]]
    assert 0.3 < 1 - len(set(blocks)) / len(blocks) < 0.7


def test_scales_shrink_a_trace_and_the_model_bounds_it(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 4000, "input_length": 6758, "output_length": 50, "hash_ids": [*range(14)]},
        {"timestamp": 5000, "input_length": 7322, "output_length": 0, "hash_ids": [*range(15)]},
        {"timestamp": 6500, "input_length": 90_000, "output_length": 5, "hash_ids": [*range(176)]},
    ]
    path = write_rows(tmp_path / "big.jsonl", rows)
    work = made(
        f"mooncake:{path}",
        input_scale=1 / 64,
        time_scale=0.5,
        max_len=512,
    )
    assert [session.start_s for session in work.sessions] == [0, 0.5, 1.25]
    turns = [session.turns[0] for session in work.sessions]
    assert [turn.num_prompt_tokens for turn in turns] == [106, 114, 475]
    assert [count(turn.prompt) for turn in turns] == [106, 114, 475]
    assert [turn.max_tokens for turn in turns] == [50, 1, 5]
    assert turns[1].prompt.startswith(turns[0].prompt)  # 13 blocks, and the same next one
    assert turns[2].prompt.startswith(turns[1].prompt)
    few = made(f"mooncake:{path}", max_requests=2)
    assert few.num_requests == 2


def test_times_of_a_trace_can_be_kept_cut_or_replaced() -> None:
    source = f"mooncake:{TRACE}"
    own = made(source, num=None, duration_s=20, block_size=64)
    assert 20 < len(own.sessions) < 60
    assert all(session.start_s < 20 for session in own.sessions)
    assert len(made(source, num=7, block_size=64).sessions) == 7
    other = made(source, "constant:10", num=None, block_size=64)
    assert [session.start_s for session in other.sessions] == [k / 10 for k in range(120)]
    assert len(made(source, "constant:10", num=None, duration_s=5, block_size=64).sessions) == 50
    assert firsts(other) == firsts(made(source, num=None, block_size=64))


def test_mooncake_sessions_and_literal_prompts_of_aiperf(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 30, "output_length": 4},
        {"timestamp": 10.5, "text_input": "How many?", "output_length": 5, "extra": {"top_k": 1}},
        {"session_id": "a", "delay": 1500, "input_length": 20, "output_length": 6},
        {"timestamp": 20, "messages": messages, "tools": [{"type": "function"}]},
    ]
    work = made(f"mooncake:{write_rows(tmp_path / 't.jsonl', rows)}", num=None)
    first, second, third = work.sessions
    assert [turn.num_prompt_tokens for turn in first.turns] == [30, 20]
    assert [turn.think_s for turn in first.turns] == [0.0, 1.5]
    assert first.turns[0].prompt != first.turns[1].prompt
    assert second.start_s == 0.0105
    assert (second.turns[0].prompt, second.turns[0].max_tokens) == ("How many?", 5)
    assert second.turns[0].extra == {"top_k": 1}
    assert third.turns[0].prompt == messages
    assert third.turns[0].extra == {"tools": [{"type": "function"}]}
    assert third.turns[0].max_tokens == 200


def test_text_conversations_go_on_after_a_space(tmp_path: Path) -> None:
    turn: dict[str, Any] = {"session_id": "a", "input_length": 20, "output_length": 8}
    rows = [turn | {"timestamp": 0}, turn | {"delay": 10}, turn | {"delay": 10}]
    work = made(f"mooncake:{write_rows(tmp_path / 't.jsonl', rows)}", num=None, chat=False)
    (session,) = work.sessions
    assert not session.turns[0].prompt.startswith(" ")
    assert all(turn.prompt.startswith(" ") for turn in session.turns[1:])
    assert count("".join(turn.prompt for turn in session.turns)) == 60


def test_burstgpt_rows_keep_times_and_lengths_and_lose_failures(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,GPT-4,100,0,100,API log\n"
        "118,GPT-4,30,7,37,API log\n"
    )
    work = made(f"burstgpt:{path}", num=None)
    assert [session.start_s for session in work.sessions] == [0, 113]
    turns = [session.turns[0] for session in work.sessions]
    assert [count(turn.prompt) for turn in turns] == [472, 30]
    assert [turn.max_tokens for turn in turns] == [18, 7]
    assert turns[0].prompt.split()[:PAGE] != turns[1].prompt.split()[:PAGE]


def test_burstgpt_sessions_begin_alike(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\n"
        "0,s1,1,m,40,18\n1,s2,1,m,60,9\n9,s1,1,m,90,7\n"
    )
    one, two, three = firsts(made(f"burstgpt:{path}", num=None))
    assert three.startswith(one + " ")
    assert two.split()[:PAGE] != one.split()[:PAGE]


ROW = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"hash_ids": [1]}, ":2: hash_ids has 1 blocks for input_length 600"),
        (ROW | {"hash_ids": [1, 2, 3]}, "block size of 512"),
        (ROW | {"hash_ids": [1, "2"]}, ":2: Expected `int`, got `str` - at `$.hash_ids[1]`"),
        (ROW | {"timestamp": -1}, ":2: Expected `float` >= 0.0 - at `$.timestamp`"),
        (ROW | {"timestamp": None}, ":2: has no start time, others have"),
        (ROW | {"input_length": 0.5}, "got `float` - at `$.input_length`"),
        (ROW | {"output_length": "x"}, "got `str` - at `$.output_length`"),
        ({"timestamp": 1, "output_length": 3}, ":2: needs one of input_length"),
        (ROW | {"text_input": "x"}, ":2: needs one of input_length"),
        ({"timestamp": 1, "text_input": ""}, "at `$.text_input`"),
        (ROW | {"payload": {}}, ":2: Object contains unknown field `payload`"),
        (
            {"timestamp": 1, "messages": [{"role": "user"}], "session_id": "s"},
            "message_mode delta",
        ),
        ({"timestamp": 1, "messages": ["x"]}, "at `$.messages[0]`"),
        ({"timestamp": 1, "messages": [{}]}, "objects with a role"),
        ({"session_id": "s", "timestamp": 3, "text_input": "x"}, ":2: a later turn"),
    ],
)
def test_wrong_rows_are_refused_by_file_line_and_field(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "bad", [ROW | {"session_id": "s"}, row])
    with pytest.raises(ValueError, match=re.escape(message)):
        made(f"mooncake:{path}", num=None)


def test_completions_take_no_messages(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "messages": [{"role": "user", "content": "Hi"}]}]
    with pytest.raises(ValueError, match=":1: completions take no messages"):
        made(f"mooncake:{write_rows(tmp_path / 'm', rows)}", num=None, chat=False)


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(ValueError, match="mooncake: there is no file"):
        made(f"mooncake:{path}")
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no request"):
        made(f"mooncake:{path}")
    path.write_text('\n{"a"\n')
    with pytest.raises(ValueError, match=":2: Input data was truncated"):
        made(f"mooncake:{path}")
    path.write_text("Timestamp,Request tokens\n1,2\n")
    with pytest.raises(ValueError, match=":2: Object missing required field `response tokens`"):
        made(f"burstgpt:{path}")
    for row in ("1,,3", "inf,2,3", "1,-2,3"):
        path.write_text(f"Timestamp,Request tokens,Response tokens\n{row}\n")
        with pytest.raises(ValueError, match=":2: Expected"):
            made(f"burstgpt:{path}")


# Workloads


def test_the_number_of_sessions_follows_from_rate_and_duration() -> None:
    work = made("synthetic:8,4", "constant:5", num=None, duration_s=10)
    assert len(work.sessions) == 50
    assert work.about["num_requests"] == work.num_requests == 50
    assert work.about["sessions_per_s"] == pytest.approx(5)
    assert work.about["prompt_tokens"] == {"sum": 400, "mean": 8, "min": 8, "p50": 8, "max": 8}
    assert work.about["exact"] is True


@pytest.mark.parametrize(
    ("source", "arrivals", "options", "message"),
    [
        ("books", None, {}, "source: 'books' is none of problems, synthetic"),
        ("problems:new", None, {}, "problems: 'new'"),
        ("synthetic:12", None, {}, "synthetic: the form is synthetic:IN,OUT"),
        ("synthetic:x,12", None, {}, "synthetic: IN: 'x' is no whole number"),
        ("synthetic:12,0", None, {}, "synthetic: OUT: must be at least 1"),
        ("synthetic:9-3,12", None, {}, "synthetic: IN: must be at least 9"),
        ("synthetic:gauss(3,1),12", None, {}, "synthetic: IN: 'gauss(3,1)' is not normal"),
        ("synthetic:normal(3),12", None, {}, "synthetic: IN: normal takes two numbers"),
        ("shared-prefix:0,9,9,9", None, {}, "shared-prefix: GROUPS"),
        ("shared-prefix:1,9,9", None, {}, "shared-prefix: the form is"),
        ("synthetic:9,9", "poison:4", {}, "arrivals: 'poison:4' is none of"),
        ("synthetic:9,9", None, {"max_len": 20}, "max_len: 20 leaves no room"),
        ("synthetic:9,9", None, {"time_scale": 0.0}, "time_scale: must be above 0"),
        ("synthetic:9,9", None, {"block_size": 0}, "block_size: must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_by_the_name_of_the_part(
    source: str, arrivals: str | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made(source, arrivals, **options)


def test_a_run_needs_something_to_send() -> None:
    with pytest.raises(ValueError, match="a closed loop needs their number"):
        made("synthetic:8,4", num=None, duration_s=10)
    with pytest.raises(ValueError, match="sessions: must be at least 1"):
        made("synthetic:8,4", num=0)
    with pytest.raises(ValueError, match="nothing to send within"):
        made("synthetic:8,4", "poisson:0.001", num=None, duration_s=0.1)
    with pytest.raises(ValueError, match="synthetic: needs a tokenizer"):
        made("synthetic:8,4", tokenizer=None)
    with pytest.raises(ValueError, match=":1: has lengths, which need a tokenizer"):
        made(f"mooncake:{TRACE}", tokenizer=None, block_size=64)
