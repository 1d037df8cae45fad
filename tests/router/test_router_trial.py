"""Grammars that cost too much are refused by a process of their own, which may die of them."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from router.errors import ApiError
from router.text import trial
from router.text.bounded import Bounds
from router.text.grammar import Validator, composed, schema_part
from router.text.trial import TOO_MUCH, Trials, _Process
from tests.support.prompts import TINY, VOCAB, ll_tokenizer
from tests.support.tokenizer_kinds import made
from worker.errors import Busy

SLOW = {"type": "integer", "multipleOf": 999983}
GOOD = {"type": "integer", "multipleOf": 7}


def grammar(schema: dict[str, Any]) -> str:
    part = schema_part(schema, "guided_json", Bounds(512, 9 * 10**18))
    return composed([("form", part)], ["body: @form"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were tried."""
    found: list[str] = []
    ask = _Process.ask

    def noted(self: _Process, text: str) -> dict[str, Any]:
        found.append(text)
        return ask(self, text)

    monkeypatch.setattr(_Process, "ask", noted)
    return found


@pytest.fixture(scope="module")
def trials() -> Callable[..., Trials]:
    return functools.partial(Trials, TINY, VOCAB)


def test_good_and_bad_grammars_are_told_apart_by_one_process(trials, asked: list[str]) -> None:
    tried = trials()
    for _ in range(2):
        assert tried.verdict(grammar(GOOD)).error == ""
        assert (
            "nothing"
            in tried.verdict(json.dumps({"grammars": [{"lark_grammar": "start: nothing"}]})).error
        )
        assert tried.verdict(grammar({"type": "integer", "minimum": 5, "maximum": 3})).error != ""
    assert len(asked) == 3
    assert sum(each is not None for each in tried._free.queue) == 1


@pytest.mark.parametrize("limits", [{"memory_bytes": 32 << 20}, {"cpu_s": 0}], ids=str)
def test_a_process_that_passes_a_limit_is_replaced_and_its_grammar_kept_refused(
    trials, asked: list[str], limits: dict[str, int]
) -> None:
    tried = trials(**({"cpu_s": 60, "memory_bytes": 2 << 30} | limits))
    for _ in range(3):
        assert tried.verdict(grammar(SLOW)).error == TOO_MUCH
        assert tried.verdict(grammar(GOOD)).error == ""
    assert len(asked) == 2


def test_a_grammar_whose_first_step_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = grammar({"anyOf": [{"type": "boolean"}, {"type": "object"}]})
    assert trial._verdict(text, ll_tokenizer()).error == ""
    monkeypatch.setattr(trial, "GRAMMAR_LIMITS", LLParserLimits(step_max_items=1))
    assert not LLMatcher(ll_tokenizer(), text, limits=trial.GRAMMAR_LIMITS).is_error()
    assert "many items" in trial._verdict(text, ll_tokenizer()).error


@pytest.mark.parametrize("keyword", ["required", "properties", "prefixItems"])
def test_a_refusal_that_llguidance_cannot_put_into_words_is_one(trials, keyword: str) -> None:
    """It panics where it cuts what it quotes within a character: a 500 for the client's mistake."""
    schema = {"type": "object", keyword: "\N{GRINNING FACE}" * 40}
    tried = trials()
    assert tried.verdict(grammar(schema)).error != ""
    assert tried.verdict(grammar(schema)).error != "", "it is kept"


def test_a_dead_process_is_replaced_and_a_failure_is_not_kept(
    trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = trials()
    assert tried.verdict(grammar(GOOD)).error == ""
    process = tried._free.queue[-1]
    assert process is not None
    process._process.kill()
    process._process.wait()
    assert tried.verdict(grammar({"type": "null"})).error == ""
    with monkeypatch.context() as patched:
        failed = {"failed": "Panic()", "is_worn": False}
        patched.setattr(_Process, "ask", lambda self, text: failed)
        with pytest.raises(RuntimeError, match="Panic"):
            tried.verdict(grammar({"type": "boolean"}))
    assert tried.verdict(grammar({"type": "boolean"})).error == ""


def test_a_tokenizer_that_llguidance_cannot_use_is_told_and_asked_for_again(tmp_path: Path) -> None:
    validator = Validator(tmp_path, VOCAB)
    with pytest.raises(ApiError, match=r"x: no grammars for this model: .*No such file"):
        validator.require("x")
    file = tmp_path / "tokenizer.json"
    file.write_text(made("words")[0].to_str())
    assert not validator.is_usable
    assert validator.tried(GOOD) == ""
    with pytest.raises(ApiError, match=r"x: no grammars for this model: .*decoder"):
        validator.require("x")


def test_when_all_processes_are_busy_a_client_is_told_to_come_back(
    trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "WAIT_S", 0.01)
    monkeypatch.setattr(trial, "NUM_PROCESSES", 0)
    with pytest.raises(Busy):
        trials().verdict(grammar(GOOD))
