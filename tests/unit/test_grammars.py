"""Grammars of a decode worker: compiled once, beside the engine, and never too slow for it."""

import json
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from llguidance import LLMatcher

from tests.support.prompts import EOS, TINY, VOCAB
from worker.draw import grammar
from worker.draw.grammar import MAX_PROTOTYPES, Grammars
from worker.errors import UserError

DIGITS = LLMatcher.grammar_from_regex("[0-9]{3}x")
WORD = LLMatcher.grammar_from_regex("[a-z]{3}")


class Counted:
    """Compiles, once `gate` is open, and says in which threads it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.threads = threading.Event(), list[str]()
        self.gate.set()
        monkeypatch.setattr(grammar, "LLMatcher", self)

    def __call__(self, *args: Any, **kwargs: Any) -> LLMatcher:
        assert self.gate.wait(30)
        self.threads.append(threading.current_thread().name)
        return LLMatcher(*args, **kwargs)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def made(wake: Any = lambda: None) -> Grammars:
    return Grammars(TINY, VOCAB, [EOS], wake)


def test_a_grammar_is_ready_once_another_thread_has_compiled_it(counted: Counted) -> None:
    woken = threading.Event()
    grammars = made(woken.set)
    counted.gate.clear()
    assert not grammars.ready(DIGITS)
    assert not grammars.ready(DIGITS)
    counted.gate.set()
    assert woken.wait(30)
    assert grammars.ready(DIGITS)
    matchers = [grammars.matcher(DIGITS, ()) for _ in range(128)]
    assert len(counted.threads) == 1
    assert counted.threads[0] != threading.current_thread().name
    masks = grammars.masks(matchers[:2]).words
    assert torch.equal(masks[1], masks[2])


def test_copies_of_a_grammar_follow_outputs_of_their_own() -> None:
    grammars = made()
    digit = next(token for token in range(VOCAB) if allows(grammars, [], token))
    assert allows(grammars, [digit], digit)
    assert allows(grammars, [], digit)
    assert not allows(grammars, [digit] * 3, digit)


def allows(grammars: Grammars, output: list[int], token: int) -> bool:
    words = grammars.masks([grammars.matcher(DIGITS, output)]).words
    return bool((int(words[1, token // 32]) >> (token % 32)) & 1)


def test_a_refusal_is_kept_and_a_failure_is_not(counted: Counted) -> None:
    grammars = made()
    for _ in range(3):
        with pytest.raises(UserError, match="grammar"):
            grammars.matcher(json.dumps({"grammars": [{"lark_grammar": "start: nothing"}]}), ())
    assert len(counted.threads) == 1
    with (
        mock.patch.object(grammar, "LLMatcher", side_effect=OSError),
        pytest.raises(Exception, match="llguidance failed"),
    ):
        grammars.matcher(DIGITS, ())
    grammars.matcher(DIGITS, ())


def test_few_grammars_are_kept_and_worn_ones_are_compiled_again(counted: Counted) -> None:
    grammars = made()
    texts = [LLMatcher.grammar_from_regex(f"a{{{i}}}") for i in range(1, MAX_PROTOTYPES + 2)]
    for text in (*texts, texts[-1]):
        matcher = grammars.matcher(text, ())
    assert len(counted.threads) == len(texts)
    grammars.matcher(texts[0], ())
    assert len(counted.threads) == len(texts) + 1
    with mock.patch.object(grammar, "MAX_MASKS", 3):
        for _ in range(4):
            grammars.masks([matcher])
        grammars.matcher(texts[-1], ())
    assert len(counted.threads) == len(texts) + 2


def test_a_grammar_whose_mask_takes_too_long_ends_its_requests_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = made()
    slow, same, usual = (grammars.matcher(text, ()) for text in (DIGITS, DIGITS, WORD))
    fill, clock_s, filled = grammar.bitmask.fill_next_token_bitmask, [0.0], list[LLMatcher]()

    def timed_fill(matcher: LLMatcher, lines: Any) -> None:
        filled.append(matcher)
        clock_s[0] += 9.0 if matcher is slow._matcher else 0.001
        fill(matcher, lines)

    monkeypatch.setattr(grammar.bitmask, "fill_next_token_bitmask", timed_fill)
    monkeypatch.setattr(grammar.time, "thread_time", lambda: clock_s[0])
    words = grammars.masks([slow, same, None, usual]).words
    assert isinstance(slow.error, UserError)
    assert same.error is slow.error
    assert usual.error is None
    assert filled == [slow._matcher, usual._matcher]
    assert (words[1:3] == -1).all()
    assert not (words[3] == -1).all()
    with pytest.raises(UserError, match="too slow"):
        grammars.matcher(DIGITS, ())


@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB + 8])
def test_its_tokenizer_is_the_routers(tmp_path: Path, vocab_size: int) -> None:
    """With tokens that other files than tokenizer.json have, and no truncation."""
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    fields = json.loads((TINY / "tokenizer.json").read_text()) | {"truncation": cut}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    (tmp_path / "tokenizer_config.json").write_text('{"extra_special_tokens": ["<|tool|>"]}')
    grammars = Grammars(tmp_path, vocab_size, [EOS])
    words = LLMatcher.grammar_from_regex("[a-z]{40}")
    assert grammars.matcher(words, ()).error is None
    named = json.dumps({"grammars": [{"lark_grammar": "start: <|tool|>"}]})
    if vocab_size == VOCAB:  # the model has no such token
        with pytest.raises(UserError, match="grammar"):
            grammars.matcher(named, ())
        return
    words = grammars.masks([grammars.matcher(named, ())]).words[1]
    allowed = [token for token in range(vocab_size) if (int(words[token // 32]) >> token % 32) & 1]
    assert allowed == [VOCAB]
