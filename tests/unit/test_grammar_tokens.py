"""llguidance's reading of tokenizers: whatever a constraint of text offers, it takes."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from router.text.grammar import composed
from tests.support.call_checks import forced
from tests.support.prompts import EOS, TINY, VOCAB
from worker.config.checkpoint.grammar_tokens import grammar_tokenizer
from worker.config.checkpoint.tokens import FLAGS, TokenizerFile
from worker.draw.grammar import Grammars

MARKS = ("<tool_call>", "</tool_call>", "[TOOL]", "<call▁begin>", "  ", "::")
TAG = VOCAB  # the id of the first


def described(**flags: bool) -> TokenizerFile:
    """The bundled tokenizer with these tokens, and one that its model has no place for."""
    fields: dict[str, Any] = json.loads((TINY / "tokenizer.json").read_text())
    off = dict.fromkeys(FLAGS, False) | flags
    added = [{"id": TAG + i, "content": each, **off} for i, each in enumerate((*MARKS, "<far>"))]
    fields["added_tokens"] += added
    return TokenizerFile(TINY / "tokenizer.json", json.dumps(fields), fields)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("flag", ["special", "lstrip", "rstrip", "normalized"])
def test_what_is_offered_is_taken_and_says_the_text(flag: str, special: bool) -> None:
    tokens = grammar_tokenizer(described(**{flag: True, "special": special}), VOCAB + len(MARKS))
    for mark in (*MARKS, "<|im_end|>"):
        text = f"a {mark} {mark}{mark}b"
        word, value = json.dumps(text, ensure_ascii=False), {"a": text}
        compact = {"const": value, "x-guidance": {"whitespace_flexible": False}}
        for grammar, said in (
            (LLMatcher.grammar_from_lark(f"start: {word}"), {text}),
            (
                LLMatcher.grammar_from_lark(f'start: {word} | "x" | {word} "y"'),
                {text, "x", text + "y"},
            ),
            (composed([("form", {"json_schema": compact})], ["body: @form"]), {f'{{"a":{word}}}'}),
        ):
            for seed in range(2):
                assert forced(tokens, grammar, seed) in said


def test_a_tag_is_one_token_or_its_pieces_with_drafts_and_without(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(described().text)
    grammars = Grammars(tmp_path, VOCAB + len(MARKS), [EOS])
    pieces = grammar_tokenizer(described(), VOCAB).tokenize_str(MARKS[0])
    assert len(pieces) > 1
    choice = LLMatcher.grammar_from_lark(f'start: "{MARKS[0]}ab" | "x"')
    for way in ([TAG], pieces):
        matcher, followed = grammars.matcher(choice, ()), [*way]
        behind = grammars.masks([matcher], [followed]).words[1:]
        for i, token in enumerate(followed):
            alone = grammars.masks([matcher]).words[1]
            assert behind[i].tolist() == alone.tolist()
            assert alone[token // 32] >> token % 32 & 1
            matcher.consume(token)
        assert behind[-1].tolist() == grammars.masks([matcher]).words[1].tolist()
        assert matcher.error is None
    alone = grammars.masks([grammars.matcher(LLMatcher.grammar_from_regex(MARKS[0]), ())]).words[1]
    assert [i for i in range(TAG + 1) if alone[i // 32] >> i % 32 & 1] == [TAG]  # as in a prompt
