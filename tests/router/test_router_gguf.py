"""The vocabularies of GGUF files: ids are those of the tokenizers that they were made from."""

import json
import re
import unicodedata
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from router.text.tokenizer import Text
from tests.support.gguf_files import CONTROL, NORMAL, USER_DEFINED, Words, write_words
from tests.support.pairwise import whole
from tests.support.tokenizer_kinds import OTHERS, SPLITS, bpe, texts
from worker.config import ModelConfig
from worker.config.checkpoint.shape import read_model_shape
from worker.config.gguf.vocabulary import SPACE

END, USER = "<|im_end|>", "<|user|>"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
TEKKEN = SPLITS["gpt-oss"][0].replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"{1,3}", "")


def by_regex(pattern: str, **parts: Any) -> Tokenizer:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return bpe(pre=pre_tokenizers.Sequence([cut, level]), of_bytes=True, **parts)


def of_digits() -> Tokenizer:
    return bpe(pre=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), LEVEL]), of_bytes=True)


# How published tokenizers of these names are made; tokenizer.ggml.pre.
PUBLISHED = {
    "gpt-2": lambda: bpe(pre=LEVEL, of_bytes=True),
    "smollm": of_digits,
    "llama-bpe": lambda: by_regex(SPLITS["llama3"][0]),
    "qwen2": lambda: by_regex(SPLITS["qwen3"][0], normalizer=normalizers.NFC()),
    "gpt-4o": lambda: by_regex(SPLITS["gpt-oss"][0]),
    "tekken": lambda: by_regex(TEKKEN),
}


def of_tokenizer(made: Tokenizer, pre: str) -> Words:
    """As a converter writes it, with an end of turns that tokenizer.json calls special."""
    model = json.loads(made.to_str())["model"]
    made.add_special_tokens([AddedToken(END, normalized=False)])
    added = {i: token.special for i, token in made.get_added_tokens_decoder().items()}
    size, kinds = made.get_vocab_size(), {None: NORMAL, True: CONTROL, False: USER_DEFINED}
    return Words(
        [made.id_to_token(i) for i in range(size)],
        model="gpt2",
        pre=pre,
        types=[kinds[added.get(i)] for i in range(size)],
        merges=[" ".join(each) for each in model["merges"]],
        keys={"ggml.eos_token_id": made.token_to_id(END), "chat_template": TEMPLATE},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(autouse=True)
def _own_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))


def text_of(file: Path) -> Text:
    return Text(ModelConfig(path=str(file)).directory)


MADE: dict[str, tuple[Tokenizer, Text]] = {}


@pytest.mark.parametrize("pre", PUBLISHED)
@settings(max_examples=1000 if whole else 20)
@given(text=texts)
def test_ids_of_bytes_are_those_of_the_published_tokenizer(
    pre: str, folder: Path, text: str
) -> None:
    if pre not in MADE:
        made = PUBLISHED[pre]()
        MADE[pre] = made, text_of(write_words(folder / f"{pre}.gguf", of_tokenizer(made, pre)))
    made, found = MADE[pre]
    assume(not any(each.content in text for each in OTHERS))  # GGUF has no word for their spaces
    ids = found.encode(text, add_special_tokens=False)
    assert list(ids) == made.encode(text, add_special_tokens=False).ids
    normal = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert found.decode(ids, skip_special_tokens=False) == normal


PIECES = [
    *("the_", "cat", "sat", "on", "mat", ",", "and", "it_", "er", "an", "he", "at_", "th", "ca_"),
    *("_ca", "_the", "\u00e9t", "ab", "abc", "bc", "abcd"),
]
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def sentencepiece(*, gemma: bool) -> Words:
    """A vocabulary whose scores are not in the order of its tokens; Gemma's are, but for spaces."""
    letters = [*"abcdefghijklmnopqrst", SPACE, "\u00e9", "\n"]
    pieces = [each.replace("_", SPACE) for each in PIECES]
    runs = [" " * num for num in (2, 3, 4, 8)] if gemma else []
    tokens = ["<unk>", "<s>", END, USER, "<tool>", *runs, *BYTES, *pieces, *letters]
    types = [2, CONTROL, CONTROL, CONTROL, *[USER_DEFINED] * (1 + len(runs)), *[6] * 256]
    types += [NORMAL] * (len(tokens) - len(types))
    ranks = {piece: (i if gemma else 7 * i % len(pieces)) for i, piece in enumerate(pieces)}
    scores = [-1000.0 if token in runs else -float(ranks.get(token, 1000)) for token in tokens]
    keys = {"bos": 1, "eos": 2, "unknown": 0}
    return Words(
        tokens, types=types, scores=scores,
        keys={f"ggml.{name}_token_id": i for name, i in keys.items()}
        | {"ggml.add_space_prefix": not gemma, "chat_template": TEMPLATE},
    )  # fmt: skip


def merged(text: str, words: Words, ranks: dict[str, float]) -> list[int]:
    """As sentencepiece does it: of all adjacent pairs the best is merged, the first of equals."""
    ids = {token: i for i, token in enumerate(words.tokens)}
    symbols = list(text)
    while True:
        pairs = [a + b for a, b in pairwise(symbols)]
        best = min((p for p in pairs if p in ranks), key=ranks.__getitem__, default=None)
        if best is None:
            break
        at = pairs.index(best)
        symbols[at : at + 2] = [best]
    return [i for x in symbols for i in ([ids[x]] if x in ids else map(ids.get, in_bytes(x)))]


def in_bytes(text: str) -> list[str]:
    return [BYTES[each] for each in text.encode()]


def by_hand(text: str, words: Words, *, gemma: bool) -> list[int]:
    """Special tokens first; then a space before each text that is left, but in Gemma's."""
    mergeable = [i for i, kind in enumerate(words.types) if kind == NORMAL]
    mergeable += [i for i, token in enumerate(words.tokens) if set(token) == {" "}]
    words = replace(words, tokens=[token.replace(" ", SPACE) for token in words.tokens])
    ranks = {words.tokens[i]: i if gemma else -words.scores[i] for i in mergeable}
    found = []
    for part in re.split(r"(<unk>|<s>|<\|im_end\|>|<\|user\|>|<tool>)", text):
        if part in words.tokens[:5]:
            found.append(words.tokens.index(part))
        elif part:
            found += merged((SPACE * (not gemma) + part).replace(" ", SPACE), words, ranks)
    return found


spoken = st.lists(
    st.sampled_from([*PIECES, "the cat", " ", "  ", "   ", "abcd", "ab", USER, END, "<tool>", "\n"])
    | st.text(max_size=3),
    max_size=12,
).map(lambda parts: "".join(parts).replace("_", " ").replace(SPACE, " "))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@settings(max_examples=1000 if whole else 20)
@given(text=spoken)
def test_ids_of_sentencepiece_are_those_of_its_merges(
    architecture: str, folder: Path, text: str
) -> None:
    gemma = architecture == "gemma3"
    words = sentencepiece(gemma=gemma)
    if architecture not in MADE:
        file = write_words(folder / f"{architecture}.gguf", words, architecture)
        MADE[architecture] = Tokenizer.from_file, text_of(file)
    found = MADE[architecture][1]
    ids = found.encode(text, add_special_tokens=False)
    assert list(ids) == by_hand(text, words, gemma=gemma)
    assert found.encode(text, add_special_tokens=True) == (1, *ids)
    assume(not gemma or not text.startswith(" "))
    if not any(token in text for token in words.tokens[:5]):  # beside which a space is left
        assert found.decode(ids) == text


def test_special_tokens_the_template_and_what_ends_an_answer(folder: Path) -> None:
    file = write_words(folder / "special.gguf", sentencepiece(gemma=False))
    found = text_of(file)
    assert found.render([{"content": "the cat"}]) == "<s>the cat<|im_end|>"
    assert found.special_ids == {0, 1, 2, 3}
    assert found.token_of("<tool>") == 4
    assert read_model_shape(found.directory).eos_token_ids == (2,)
    # A file names one end of several, and a token of HTML is none.
    words = Words(["<eos>", "</s>", "<end_of_turn>"], types=[CONTROL, USER_DEFINED, CONTROL])
    found = text_of(
        write_words(folder / "ends.gguf", replace(words, keys={"ggml.eos_token_id": 2}))
    )
    assert read_model_shape(found.directory).eos_token_ids == (2, 0)
