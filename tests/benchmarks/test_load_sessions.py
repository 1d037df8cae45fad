"""Agents' sessions in the load harness: what is sent, and what is said of it by session."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.load import agents, agree, options, sessions
from benchmarks.load.client import Conversation, Target
from benchmarks.load.prompts import Options
from benchmarks.load.records import Objectives, Outcome, Result, Run, Session, Turn, Workload
from benchmarks.load.words import Words
from benchmarks.load.workload import workload

TINY = Tokenizer.from_file("worker/assets/tiny/tokenizer.json")


def made(source: str, num: int | None = None, **how: Any) -> Workload:
    return workload(
        source, None, num_sessions=num, duration_s=None, seed=0, tokenizer=TINY,
        options=Options(**how),
    )  # fmt: skip


@pytest.mark.parametrize("name", agents.PRESETS)
def test_a_preset_draws_what_it_states(name: str) -> None:
    chosen, scale = agents.PRESETS[name], 64
    work = made(f"agents:{name},{scale},6", 200)
    assert len(work.sessions) == 200
    first = [str(session.turns[0].prompt).split() for session in work.sessions]
    shared, group = chosen.system // scale, round(chosen.repository / scale)
    assert len({" ".join(words[:shared]) for words in first}) == 1
    groups = {" ".join(words[shared : shared + group]) for words in first}
    assert 20 < len(groups) <= chosen.groups
    later = [turn for session in work.sessions for turn in session.turns[1:]]
    appended = [turn.num_prompt_tokens * scale for turn in later]
    assert np.median(appended) == pytest.approx(chosen.append.median, rel=0.15)
    turns = [turn for session in work.sessions for turn in session.turns]
    assert np.median([t.max_tokens * scale for t in turns]) == pytest.approx(
        chosen.output.median, rel=0.3
    )
    pauses = np.array([turn.think_s for turn in later])
    assert chosen.tool_pause.median < np.median(pauses) < chosen.human_pause.median
    assert not any(session.turns[0].think_s for session in work.sessions)
    assert made(f"agents:{name},{scale},6", 200).about["digest"] == work.about["digest"]


def test_a_session_ends_where_the_model_has_no_room_left() -> None:
    work = made("agents:tracelab,64", 20, max_len=3000)
    for session in work.sessions:
        assert sum(turn.num_prompt_tokens + turn.max_tokens for turn in session.turns) <= 3000
    assert max(len(session.turns) for session in work.sessions) > 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("agents:", "agents: the form is agents:aiperf|tracelab[,SCALE[,TURNS]]"),
        ("agents:tracelab,0", "agents: SCALE: must be above 0"),
        ("agents:tracelab,16,0.5", "agents: TURNS: must be at least 1"),
        ("agents:tracelab", "agents: a first turn needs"),
    ],
)
def test_a_source_that_is_wrong_is_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made(source, 3, max_len=4096)


def weka(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"weka:{path}"


ASKED = {"type": "n", "t": 0, "in": 100, "out": 7, "hash_ids": [1, 2]}
NEXT = {"type": "s", "t": 9, "in": 130, "out": 5, "hash_ids": [1, 2, 3], "think_time": 1.5}


def test_weka_s_sessions_replay_whole_prompts_and_their_subagents(tmp_path: Path) -> None:
    sub = {"type": "subagent", "t": 1, "requests": [ASKED | {"in": 64, "hash_ids": [1]}]}
    line = {"block_size": 64, "hash_id_scope": "local", "requests": [ASKED, sub, NEXT]}
    work = made(weka(tmp_path / "a", line, line))
    lengths = [[turn.num_prompt_tokens for turn in session.turns] for session in work.sessions]
    assert sorted(lengths) == [[64], [64], [100, 130], [100, 130]]
    parent, *others = (session for session in work.sessions if len(session.turns) == 2)
    first, second = parent.turns
    assert str(second.prompt).startswith(str(first.prompt))
    assert (second.think_s, second.max_tokens, second.is_whole) == (1.5, 5, True)
    child = next(session.turns[0] for session in work.sessions if len(session.turns) == 1)
    assert str(first.prompt).startswith(str(child.prompt))
    assert others[0].turns[0].prompt != first.prompt, "ids are a session's own"
    shared = made(weka(tmp_path / "b", *[line | {"hash_id_scope": "global"}] * 2))
    assert len({str(session.turns[0].prompt) for session in shared.sessions}) == 2
    talk = Conversation("chat")
    talk.body(first, Target((), "m"))
    talk.heard("an answer")
    messages = talk.body(second, Target((), "m"))["messages"]
    assert [message["content"] for message in messages] == [second.prompt]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 16}, "hash_ids has 2 blocks, in has 7"),
        ({"requests": []}, ":1: Expected `array` of length >= 1"),
        ({"hash_id_scope": "mine"}, ":1: Invalid enum value 'mine'"),
    ],
)
def test_a_weka_line_that_is_wrong_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    line = {"block_size": 64, "requests": [ASKED]} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        made(weka(tmp_path / "a", line))


def test_a_mooncake_payload_is_a_whole_body(tmp_path: Path) -> None:
    payload = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "top_p": 0.5}
    rows = [{"session_id": "s", "delay": delay, "payload": payload} for delay in (0, 2000)]
    (tmp_path / "a").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (session,) = made(f"mooncake:{tmp_path / 'a'}").sessions
    first, second = session.turns
    assert (first.prompt, first.max_tokens, first.extra) == (payload["messages"], 9, {"top_p": 0.5})
    assert (second.is_whole, second.think_s) == (True, 2.0)


def outcome(
    session: int, turn: int, prompt: int, cached: int, *, at: float = 0.0, **how: Any
) -> Any:
    times = [at + 0.1 + 0.05 * i for i in range(11)]
    return Outcome(
        session, turn, at, at, chunk_s=times, end_s=times[-1], num_prompt_tokens=prompt,
        num_cached_tokens=cached, num_output_tokens=11, counted=True, **how,
    )  # fmt: skip


def test_figures_by_session_are_what_a_hand_makes_of_them() -> None:
    system = "s" * 4 * sessions.CHUNK_CHARS
    own = [Turn(system + key * sessions.CHUNK_CHARS, 11) for key in "ab"]
    both = [Session((turn, Turn("more", 11))) for turn in own]
    outcomes = [
        outcome(0, 0, 500, 0),
        outcome(1, 0, 500, 400),
        outcome(0, 1, 600, 480, at=2.0),
        outcome(1, 1, 600, 0, at=3.0),
    ]
    run = Run(outcomes, [], "", wall_s=4.0)
    found = sessions.figures(run, both, Objectives(ttft_s=0.2), at_once=2, num_gpus=2)
    assert found["ideal"] == pytest.approx(500 + 100 + 2 * (600 - 511))
    assert found["prefilled"] == 500 + 100 + 120 + 600
    assert found["tokens_per_s_gpu"] == pytest.approx(44 / 4 / 2)
    assert found["tokens_per_s_user"] == pytest.approx(20)
    assert found["interactivity"] == pytest.approx(11 / 0.6)
    assert found["e2e_interactivity"] == pytest.approx(11 / 0.6)
    assert (found["num"], found["held"], found["ttft_s"]["p90"]) == (2, 2, pytest.approx(0.1))
    outcomes[3].error = "timeout"
    assert sessions.figures(run, both, Objectives(), 2, 1)["held"] == 1


def test_the_best_loads_are_marked_and_drawn(tmp_path: Path) -> None:
    loads = [(1, 50.0, 50.0), (4, 40.0, 150.0), (8, 30.0, 140.0), (16, 10.0, 200.0)]
    summaries: list[dict[str, Any]] = [
        {"sessions": {"at_once": n, "tokens_per_s_user": x, "tokens_per_s_gpu": y}}
        for n, x, y in loads
    ]
    result = Result("kvlane.load/1", {}, {}, {}, [*summaries, {"simulated_accept_len": 3.4}], [])
    lines = sessions.table(result)
    assert [line[0] for line in lines[1:]] == ["*", "*", " ", "*"]
    sessions.draw([(result.named("a<b"), result)], tmp_path / "p.svg")
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    assert len([node for node in root if node.tag.endswith("circle")]) == 4
    assert "a<b (SIMULATED: 3.4 tokens a step)" in "".join(root.itertext())


def test_sessions_are_a_closed_loop_of_agents_unless_a_source_is_named() -> None:
    asked = options.parse(["--sessions", "2,4"])
    assert (asked.sessions, asked.concurrency, asked.source) == ((2, 4), 2, options.AGENTS)
    assert options.parse(["--sessions", "2", "--source", "random:9,9"]).source == "random:9,9"
    for flags in (["--sessions", "a"], ["--sessions", "0"], ["--sessions", "1", "--repeat", "2"]):
        with pytest.raises(ValueError, match="--sessions: "):
            options.parse(flags)


def test_what_a_server_says_is_compared() -> None:
    before = {"vllm:prompt_tokens_total": 5.0, "vllm:e2e_request_latency_seconds_count": 1.0,
              "vllm:e2e_request_latency_seconds_sum": 3.0}  # fmt: skip
    after = {"vllm:prompt_tokens_total": 1005.0, "vllm:e2e_request_latency_seconds_count": 3.0,
             "vllm:e2e_request_latency_seconds_sum": 4.2}  # fmt: skip
    run = Run([outcome(0, 0, 500, 0), outcome(1, 0, 500, 0)], [], "", 1.0)
    assert agree.table([run], before, after)[1]
    run.outcomes.append(outcome(2, 0, 50, 0))
    lines, same = agree.table([run], before, after)
    assert not same
    assert ("50.0 %" in lines[1], "5.0 %" in lines[2]) == (True, True)
    del run.outcomes[2]
    llama = {"llamacpp:prompt_tokens_total": 900.0, "llamacpp:prompt_tokens_cached_total": 100.0,
             "llamacpp:prompt_seconds_total": 0.2,
             "llamacpp:tokens_predicted_seconds_total": 1.0}  # fmt: skip
    lines, same = agree.table([run], {}, llama)
    assert (same, len(lines)) == (True, 4), lines
    assert not agree.table([run], {}, llama | {"llamacpp:prompt_seconds_total": 0.3})[1]
    run.outcomes[0].num_text_tokens = 11
    assert agree.table([run], {}, {})[1], "of one that tells nothing: its usage and its text"


def test_the_preset_s_words_fit_the_bundled_tokenizer() -> None:
    assert Words(TINY).is_additive
