"""Tokenizers of every kind that models have, trained on two lines, and texts to tell them apart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from router.text.backend import Encode, encode_of
from router.text.encoder import Encoder, cut_pattern
from tests.support.prompts import TINY
from worker.config.checkpoint.tokens import TokenizerFile

START, END = "<|start|>", "<|end|>"
CORPUS = ["the cat sat on the mat, and it sat there for 12 days", "Ünïcödé ist überall  zu Hause"]
OTHERS = (  # which begin where one may cut, or may not
    AddedToken("<|left|>", lstrip=True, special=True, normalized=False),
    AddedToken("<|right|>", rstrip=True, special=True, normalized=False),
    AddedToken("<tool>", normalized=True),
    AddedToken("word", single_word=True, normalized=False),
)
ATOMS = [
    START, END, "<|left|>", "<|right|>", "<tool>", "word", "<|", "|>", "sta", "<|start", " ", "  ",
    "\n", "the cat", " sat", "mat", "ü", "12", ".", "é", "I'll", "DON'T", "'\u017f", "e\u0301",
    "\r\n", "123456", "中文", "ひらｶﾅ", "\u00a0", "\u3000", "\u2028", "\x85", "\x1c", "\x00",
    "\ufeff", "🙂👩\u200d👧", "İ", "ǅ", "\u0345", "٣Ⅷ½", "\U00010437", "\U00031350",
]  # fmt: skip
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = {  # how models of these names cut a text into words, by their tokenizer.json
    "qwen3": (WORDS + r"\p{N}" + REST,),
    "llama3": (WORDS + r"\p{N}{1,3}" + REST,),
    "gpt-oss": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ\u30a0-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}  # fmt: skip


def trained(model: Any, trainer: Any, pre: Any = None, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(model)
    if pre is not None:
        made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    made.train_from_iterator(CORPUS * 20, trainer)
    made.add_special_tokens([AddedToken(each, normalized=False) for each in (START, END)])
    made.add_special_tokens([each for each in OTHERS if each.special])
    made.add_tokens([each for each in OTHERS if not each.special])
    return made


def bpe(*, of_bytes: bool = False, **parts: Any) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet() if of_bytes else []
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    return trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, **parts)


def of_bytes(*, space: bool = False) -> Tokenizer:
    return bpe(pre=pre_tokenizers.ByteLevel(add_prefix_space=space), of_bytes=True)


def with_a_beginning() -> Tokenizer:
    made = of_bytes()
    made.add_special_tokens(["<s>"])
    at = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", at)]
    )
    return made


def split(name: str) -> Tokenizer:
    cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[name]]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pre = pre_tokenizers.Sequence([*cuts, level])
    return bpe(pre=pre, normalizer=normalizers.NFC(), of_bytes=True)


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": of_bytes,
    "bytes, a space first": lambda: of_bytes(space=True),
    "metaspace first": lambda: bpe(pre=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace always": lambda: bpe(pre=pre_tokenizers.Metaspace(prepend_scheme="always")),
    "llama's normalizer": lambda: bpe(
        normalizer=normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    ),
    "words": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    ),
    "unigram": lambda: trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        ),
        pre_tokenizers.Metaspace(),
        normalizers.NFKC(),
    ),
    "a beginning": with_a_beginning,
    "tiny": lambda: Tokenizer.from_file(str(TINY / "tokenizer.json")),
} | {name: lambda name=name: split(name) for name in SPLITS}
SLOW = {"metaspace first", "metaspace always", "words", "unigram"}  # fastokens cannot read these
MADE: dict[str, tuple[Tokenizer, Encoder]] = {}


def encode_by(tokenizer: Tokenizer, backend: Any = "auto") -> Encode:
    text = tokenizer.to_str()
    return encode_of(
        TokenizerFile(Path("tokenizer.json"), text, json.loads(text)), tokenizer, backend
    )


def made(kind: str) -> tuple[Tokenizer, Encoder]:
    """Made once, with all the pieces that earlier examples have left."""
    if kind not in MADE:
        tokenizer = MAKERS[kind]()
        begins = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        cuts = cut_pattern(tokenizer, json.loads(tokenizer.to_str()), begins)
        MADE[kind] = tokenizer, Encoder(encode_by(tokenizer), tokenizer, cuts, 1 << 20)
    return MADE[kind]


texts = st.lists(st.sampled_from(ATOMS) | st.text(max_size=4), max_size=24).map("".join)
