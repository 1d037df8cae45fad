"""fastokens is asked where its ids are those of tokenizers, and no longer."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, models

from router.text import backend as encoding
from router.text import encoder
from router.text.backend import ALL_COMPARED, COMPARED_EVERY, MOST_REFUSED, Checked
from router.text.encoder import Encoder
from router.text.tokenizer import Text
from tests.support.pairwise import whole
from tests.support.prompts import TINY
from tests.support.tokenizer_kinds import MAKERS, SLOW, START, encode_by, made, texts
from worker.errors import LibraryError, UserError

LATER = ALL_COMPARED + 1  # calls until a text is not compared
BOTH: dict[str, tuple[encoding.Encode, encoding.Encode]] = {}


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_which_kinds_it_can_read(kind: str) -> None:
    """Where this fails it can read more or fewer: then say so in SLOW and in ADR 0003."""
    assert isinstance(encode_by(made(kind)[0]), Checked) == (kind not in SLOW)


@pytest.mark.parametrize("kind", sorted(MAKERS.keys() - SLOW))
@settings(max_examples=3000 if whole else 150)
@given(texts)
def test_its_ids_are_those_of_tokenizers(kind: str, text: str) -> None:
    if kind not in BOTH:
        checked = encode_by(made(kind)[0])
        assert isinstance(checked, Checked)
        assert checked._fast is not None
        BOTH[kind] = checked._fast, checked._right
    fast, right = BOTH[kind]
    for adds in (False, True):
        assert list(fast(text, adds)) == list(right(text, adds))


class Double:
    """An Encode that is wrong about some texts, or refuses them."""

    def __init__(self, wrong: str | None = None, refused: str | None = None) -> None:
        self.wrong, self.refused = wrong, refused
        self.asked: list[str] = []

    def __call__(self, text: str, adds: bool) -> Sequence[int]:
        self.asked.append(text)
        if text == self.refused:
            raise LibraryError("a limit")
        return [0 if text == self.wrong else 1, len(text), adds]


def test_most_texts_are_encoded_once() -> None:
    right, fast = Double(), Double()
    checked = Checked(right, fast)
    for i in range(ALL_COMPARED + 4 * COMPARED_EVERY):
        assert list(checked(f"text {i}", False)) == [1, len(f"text {i}"), False]
    assert len(fast.asked) == ALL_COMPARED + 4 * COMPARED_EVERY
    assert len(right.asked) in (ALL_COMPARED + 3, ALL_COMPARED + 4)


def test_wrong_ids_are_noticed_and_are_the_last(caplog: pytest.LogCaptureFixture) -> None:
    right, fast = Double(), Double(wrong="secret")
    checked = Checked(right, fast)
    for _ in range(LATER + 2 * COMPARED_EVERY):
        found = checked("secret", False)
    assert list(found) == [1, 6, False]
    assert len(fast.asked) == 1, "and the first of them was compared"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "secret" not in caplog.text


def test_wrong_ids_that_come_later_are_noticed_within_some_texts() -> None:
    right, fast = Double(), Double(wrong="b")
    checked = Checked(right, fast)
    for _ in range(LATER):
        checked("a", False)
    found = [checked("b", False)[0] for _ in range(2 * COMPARED_EVERY)]
    assert found.index(1) < COMPARED_EVERY
    assert set(found[found.index(1) :]) == {1}


def test_what_it_gave_is_forgotten_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MIN_CHARS", 1)
    monkeypatch.setattr(encoder, "PIECE_CHARS", 1)
    tokenizer = made("bytes")[0]
    wrong, piece = START + "mat", START + "the cat"
    right = encode_by(tokenizer, "huggingface")

    def fast(text: str, adds: bool) -> Sequence[int]:
        return [1] if text == wrong else right(text, adds)

    checked = Checked(right, fast)
    known = Encoder(checked, tokenizer, json.loads(tokenizer.to_str()), {START}, 1 << 20)
    for number in range(ALL_COMPARED):
        known.encode(f"{START}{number}", add_special_tokens=False)
    assert known.encode(wrong, add_special_tokens=False) == (1,)
    assert known.encode(wrong + piece, add_special_tokens=False)[0] == 1, "it is kept"
    known.encode(piece, add_special_tokens=False)
    while checked._fast is not None:
        del known._pieces[wrong]  # as others push it out
        known.encode(wrong, add_special_tokens=False)
    assert not known._pieces, "all that it gave"
    wanted = tuple(right(wrong + piece, False))
    assert known.encode(wrong + piece, add_special_tokens=False) == wanted
    assert known._num_bytes == sum(encoder._size(*each) for each in known._pieces.items())


@pytest.mark.parametrize("first", [0, LATER])
def test_a_text_that_it_refuses_is_encoded_all_the_same(first: int) -> None:
    right, fast = Double(), Double(refused="odd")
    checked = Checked(right, fast)
    for _ in range(first):
        checked("a", False)
    right.asked.clear()
    assert list(checked("odd", True)) == [1, 3, True]
    assert right.asked == ["odd"]
    checked("a", False)
    assert fast.asked[-1] == "a", "it is asked for the next one"


def test_what_refuses_many_one_after_another_is_not_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    right, fast = Double(), Double(refused="odd")
    checked = Checked(right, fast)
    for _ in range(3 * MOST_REFUSED):
        assert list(checked("odd", True)) == [1, 3, True]
    assert len(fast.asked) == MOST_REFUSED
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_what_differs_over_a_probe_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made("bytes")[0]
    double = Double()
    monkeypatch.setattr(encoding, "_fastokens", lambda path, described: double)
    assert not isinstance(encode_by(tokenizer), Checked)
    assert double.asked
    with pytest.raises(UserError, match="differ") as refused:
        encode_by(tokenizer, "fastokens")
    assert refused.value.param == encoding.FIELD


@pytest.mark.parametrize(
    "how", [{"truncation": {"max_length": 4}}, {"padding": {"pad_id": 0}}, {"dropout": 0.1}]
)
def test_what_looks_at_whole_texts_or_at_chance_is_left_to_tokenizers(how: dict[str, Any]) -> None:
    made_so = Tokenizer(models.BPE(dropout=how.get("dropout")))
    if "truncation" in how:
        made_so.enable_truncation(4)
    if "padding" in how:
        made_so.enable_padding()
    assert not isinstance(encode_by(made_so), Checked)


def test_a_probe_that_tokenizers_refuses_is_no_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "_fastokens", lambda path, described: Double(refused=""))
    assert not isinstance(encode_by(made("bytes")[0]), Checked)


def test_without_the_package_tokenizers_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    text = Text(TINY)
    assert not isinstance(text.encoder._encode, Checked)
    assert text.encode("Tom has 3 apples.", add_special_tokens=False)
    with pytest.raises(UserError, match="fastokens cannot encode"):
        Text(TINY, backend="fastokens")


def test_it_may_be_turned_off() -> None:
    assert isinstance(Text(TINY, backend="fastokens").encoder._encode, Checked)
    assert not isinstance(Text(TINY, backend="huggingface").encoder._encode, Checked)
    assert json.loads((TINY / "tokenizer.json").read_text())["model"]["type"] == "BPE"
