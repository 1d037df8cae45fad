"""What is known of a prompt's parts changes none of its tokens."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from router.observe.metrics import RouterMetrics
from router.text import encoder
from router.text.encoder import Encoder, cut_pattern
from router.text.tokenizer import Text
from tests.support.pairwise import whole
from tests.support.prompts import TINY
from tests.support.tokenizer_kinds import END, MAKERS, START, encode_by, made, texts

SIZES = encoder.MIN_CHARS, encoder.PIECE_CHARS
LABELS_OF = {"model": "tiny", "role": "router", "worker": "router-0"}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MIN_CHARS", 1)
    monkeypatch.setattr(encoder, "PIECE_CHARS", 1)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=150 if whole else 40)
@given(texts, st.booleans())
def test_tokens_are_those_of_the_whole_text(kind: str, text: str, adds: bool) -> None:
    tokenizer, known = made(kind)
    wanted = tuple(tokenizer.encode(text, add_special_tokens=adds).ids)
    for _ in range(2):  # the second time of pieces that are all known
        assert known.encode(text, add_special_tokens=adds) == wanted


@pytest.mark.parametrize("kind", MAKERS)
def test_the_next_turn_knows_the_last_one(kind: str) -> None:
    start, end = ("<|im_start|>", "<|im_end|>") if kind == "tiny" else (START, END)
    tokenizer, known = made(kind)
    turns = [f"{start}user\n{i} the cat sat on {i} mats{end}\n" for i in range(30)]
    known.encode("".join(turns[:-1]), add_special_tokens=False)
    num_chars, num_known = known.num_chars, known.num_known
    text = "".join(turns)
    found = known.encode(text, add_special_tokens=False)
    assert found == tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    assert known.num_chars - num_chars == len(text)
    assert known.num_known - num_known > len(text) - 2 * len(turns[-1])


def cuts(*tokens: AddedToken, **described: Any) -> set[str]:
    """Contents of the tokens before which texts are cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([token for token in tokens if token.special])
    tokenizer.add_tokens([token for token in tokens if not token.special])
    pattern = encoder.cut_pattern(tokenizer, described, {token.content for token in tokens})
    return {t.content for t in tokens if pattern is not None and pattern.fullmatch(t.content)}


def plain(content: str, **how: bool) -> AddedToken:
    return AddedToken(content, **{"normalized": False} | how)


def test_where_a_text_may_be_cut() -> None:
    assert cuts(plain(START), plain(END)) == {START, END}
    assert cuts(plain(START, rstrip=True)) == {START}
    assert not cuts(plain(START, lstrip=True))
    assert not cuts(plain(START, single_word=True))
    assert not cuts(plain(START, normalized=True))
    assert not cuts(plain("\n"))
    for begin in ("BEGIN", "_x", "\u203fx", "\u200dx", "\u0301x"):
        assert not cuts(plain(begin)), "`single_word` asks what is beside a word"
    assert not cuts(plain("<|a|>"), plain("x<|a|>")), "one holds the other"
    assert cuts(plain("<|a|>"), plain("#<|a|>")) == {"#<|a|>"}
    assert cuts(plain("<|a|>"), plain("#<|")) == {"#<|"}, "one reaches into the other"
    assert not cuts(plain("#a#")), "it reaches into itself"
    assert cuts(plain("<|a|>"), plain("<|a|>b")) == {"<|a|>", "<|a|>b"}
    assert not cuts(plain("<|a|>"), plain("<|a|>b", single_word=True)), "what is before it counts"
    assert not cuts(plain("<|a|>"), plain("<|a|>b", lstrip=True))
    assert not cuts()


def test_what_draws_by_chance_gets_whole_texts() -> None:
    assert cuts(plain(START))
    assert not cuts(plain(START), model={"dropout": 0.1})


def test_a_wrong_cut_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law above is worth something: a cut before a token that takes spaces along breaks it."""
    tokenizer, _ = made("bytes")
    monkeypatch.setattr(encoder, "_looks_back", lambda token: False)
    wrong = Encoder(
        encode_by(tokenizer), tokenizer, cut_pattern(tokenizer, {}, {"<|left|>"}), 1 << 20
    )
    text = "the cat  <|left|> sat"
    wanted = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    assert wrong.encode(text, add_special_tokens=False) != wanted


@given(st.lists(st.integers(0, 900), max_size=12), st.lists(st.integers(0, 900), max_size=4))
def test_where_a_piece_ends_depends_on_nothing_behind_it(
    lengths: list[int], more: list[int]
) -> None:
    """At the real size of pieces."""
    pattern = encoder.re.compile("<>")

    def text_of(sizes: list[int]) -> str:
        return "".join("<>" + "x" * size for size in sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "PIECE_CHARS", SIZES[1])
        first = list(encoder.cut_up(text_of(lengths), pattern))
        whole = list(encoder.cut_up(text_of(lengths + more), pattern))
    assert "".join(whole) == text_of(lengths + more)
    assert whole[: len(first) - 1] == first[:-1]
    assert all(SIZES[1] <= len(piece) <= SIZES[1] + 902 for piece in first[:-1])


def test_a_chat_s_second_turn_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the router's own text, at the real sizes; and as its metrics tell."""
    monkeypatch.setattr(encoder, "MIN_CHARS", SIZES[0])
    monkeypatch.setattr(encoder, "PIECE_CHARS", SIZES[1])
    text, plain_text = Text(TINY), Text(TINY, known_bytes=0)
    metrics = RouterMetrics("tiny", "router-0")
    metrics.watch_encoder(text.encoder)
    messages = [{"role": "user", "content": f"{i} " + "Tom has 3 apples. " * 40} for i in range(4)]
    for num in (3, 4):
        prompt = text.render(messages[:num])
        found = text.encode(prompt, add_special_tokens=False)
        assert found == plain_text.encode(prompt, add_special_tokens=False)
    values = {
        name: metrics.registry.get_sample_value(f"kvlane_{name}_total", LABELS_OF) or 0.0
        for name in ("prompt_chars", "prompt_chars_known")
    }
    turns = [len(text.render(messages[:num])) for num in (3, 4)]
    assert values["prompt_chars"] == sum(turns)
    assert 0.9 * turns[0] < values["prompt_chars_known"] <= turns[0]
    assert not plain_text.encoder.num_chars


def of_bytes(max_bytes: int) -> tuple[Tokenizer, Encoder]:
    tokenizer, _ = made("bytes")
    cuts = cut_pattern(tokenizer, json.loads(tokenizer.to_str()), {START})
    return tokenizer, Encoder(encode_by(tokenizer), tokenizer, cuts, max_bytes)


def test_it_keeps_what_was_asked_for_last_within_its_bytes() -> None:
    _, known = of_bytes(40_000)
    often = START + "the cat"
    for i in range(2000):
        known.encode(often if i % 20 == 0 else f"{START}mat {i}", add_special_tokens=False)
        assert known.num_bytes <= 40_000
        assert known.num_bytes == sum(encoder.size_of(*each) for each in known.pieces.items())
    assert known.num_known == 99 * len(often), "it was never pushed out"
    assert ("", often) in known.pieces
    assert ("", f"{START}mat 0") not in known.pieces
    assert len(known.pieces) > 50
    num = len(known.pieces)
    assert known.encode(START + "x" * 9_000, add_special_tokens=False)
    assert len(known.pieces) == num, "a large one pushes none out"


def test_without_bytes_nothing_is_kept() -> None:
    tokenizer, known = of_bytes(0)
    text = START + "the cat" + START
    wanted = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    assert known.encode(text, add_special_tokens=False) == wanted
    assert not known.pieces
    assert not known.num_chars


def test_many_threads_may_ask() -> None:
    tokenizer, known = of_bytes(3_000)
    rng = random.Random(1)
    asked = ["".join(START + f"mat {rng.randrange(12)}" for _ in range(6)) for _ in range(400)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda text: known.encode(text, add_special_tokens=False), asked))
    assert found == [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in asked]
    assert known.num_bytes == sum(encoder.size_of(*each) for each in known.pieces.items())
