"""fastokens is asked where its ids are those of tokenizers."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, models

from router.text import backend as encoding
from router.text.backend import FastFirst
from router.text.tokenizer import Text
from tests.support.pairwise import whole
from tests.support.prompts import TINY
from tests.support.tokenizer_kinds import ATOMS, CORPUS, MAKERS, SLOW, encode_by, made, texts
from worker.config.checkpoint.tokens import read_tokens
from worker.errors import LibraryError, UserError

BOTH: dict[str, tuple[encoding.Encode, encoding.Encode]] = {}


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_which_kinds_it_can_read(kind: str) -> None:
    """Where this fails it can read more or fewer: then say so in SLOW and in ADR 0003."""
    assert isinstance(encode_by(made(kind)[0]), FastFirst) == (kind not in SLOW)


@pytest.mark.parametrize("kind", sorted(MAKERS.keys() - SLOW))
@settings(max_examples=3000 if whole else 50)
@given(texts)
def test_its_ids_are_those_of_tokenizers(kind: str, text: str) -> None:
    if kind not in BOTH:
        encode = encode_by(made(kind)[0])
        assert isinstance(encode, FastFirst)
        BOTH[kind] = encode.fast, encode.right
    fast, right = BOTH[kind]
    for adds in (False, True):
        assert list(fast(text, adds)) == list(right(text, adds))


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_mending_keeps_every_kind_as_it_is(kind: str, tmp_path: Path) -> None:
    """Ids of texts and of entries; what is added and cut beside them."""
    tokenizer = made(kind)[0]
    cut = Tokenizer.from_str(tokenizer.to_str())
    cut.enable_truncation(2)
    cut.enable_padding()
    cut.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|new|>": 1 << 20}))
    file = read_tokens(tmp_path).file
    vocab = tokenizer.get_vocab()
    for entry in [*list(vocab)[::17], "<|new|>"]:
        assert file.id_of(entry) == vocab.get(entry, len(vocab))
    mended = Tokenizer.from_str(file.text)
    for text in (*CORPUS, " ".join(ATOMS)):
        for adds in (False, True):
            right = tokenizer.encode(text, add_special_tokens=adds).ids
            assert mended.encode(text, add_special_tokens=adds).ids == right


class Double:
    """An Encode that is wrong about every text, or refuses one."""

    def __init__(self, refused: str | None = None) -> None:
        self.refused = refused
        self.asked: list[str] = []

    def __call__(self, text: str, adds: bool) -> Sequence[int]:
        self.asked.append(text)
        if text == self.refused:
            raise LibraryError("a limit")
        return [1, len(text), adds]


def test_a_text_that_it_refuses_is_encoded_all_the_same() -> None:
    right, fast = Double(), Double(refused="odd")
    encode = FastFirst(fast, right)
    assert list(encode("odd", True)) == [1, 3, True]
    assert right.asked == ["odd"]
    encode("a", False)
    assert fast.asked[-1] == "a", "it is asked for the next one"
    assert right.asked == ["odd"], "most texts are encoded once"


def test_what_differs_over_a_probe_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made("bytes")[0]
    double = Double()
    monkeypatch.setattr(encoding, "_fastokens", lambda file: double)
    assert not isinstance(encode_by(tokenizer), FastFirst)
    assert double.asked
    with pytest.raises(UserError, match="differ") as refused:
        encode_by(tokenizer, "fastokens")
    assert refused.value.param == encoding.FIELD


def test_what_draws_by_chance_is_left_to_tokenizers() -> None:
    assert not isinstance(encode_by(Tokenizer(models.BPE(dropout=0.1))), FastFirst)


def test_a_probe_that_tokenizers_refuses_is_no_failed_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "_fastokens", lambda file: Double(refused=""))
    assert not isinstance(encode_by(made("bytes")[0]), FastFirst)


def test_without_the_package_tokenizers_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    text = Text(TINY)
    assert not isinstance(text.encoder.backend, FastFirst)
    assert text.encode("Tom has 3 apples.", add_special_tokens=False)
    with pytest.raises(UserError, match="fastokens cannot encode"):
        Text(TINY, backend="fastokens")


def test_it_may_be_turned_off() -> None:
    assert isinstance(Text(TINY, backend="fastokens").encoder.backend, FastFirst)
    assert not isinstance(Text(TINY, backend="huggingface").encoder.backend, FastFirst)
