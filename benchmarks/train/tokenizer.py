"""The tokenizer of the model `tiny`: byte-level BPE with single digits, and its ChatML template."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.train.chats import (
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TURN_END,
    Chat,
    long_chat,
    short_chat,
)
from benchmarks.train.model import bundled_config

CONFIG = bundled_config("tiny")
NUM_CHATS = 24_000
# One digit; a sign with its spaces; a word with its space; other signs; a line break; spaces.
PIECES = r"\p{N}| [+\-*/=] |#### | ?\p{L}+|: |, |\. | ?[^\s\p{L}\p{N}]+|\r?\n|\s"

# `content` may be text, None, or a list of parts of which the text ones count. Tools, calls and
# results are written as in Hermes; behind what the user says stands a blank call of each tool.
CHAT_TEMPLATE = "".join(
    Path(__file__).with_name("chat_template.jinja").read_text("utf-8").splitlines()
)


def train_tokenizer(
    seed: int,
    special: Sequence[str] = SPECIAL_TOKENS,
    shown: Sequence[str] = (),
    text: Callable[[random.Random], Iterator[str]] | None = None,
) -> Tokenizer:
    """A tokenizer of `vocab_size` entries; any UTF-8 text survives encode and decode.

    shown: further tokens of their own, which decoding does not skip. text: what it is made for,
    without either; None: what `tiny` says.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[*special, *shown],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text or _plain_text)(random.Random(seed)), trainer)
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"], "the text gave too few merges"
    made = json.loads(tokenizer.to_str())
    for token in made["added_tokens"]:
        token["special"] = token["content"] not in shown
    return Tokenizer.from_str(json.dumps(made))


def save_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    template: str = CHAT_TEMPLATE,
    special: Sequence[str] = SPECIAL_TOKENS,
    end: str = TURN_END,
) -> None:
    """Writes tokenizer.json and tokenizer_config.json; end: of an answer."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end,
        "pad_token": END_OF_TEXT, "bos_token": None, "unk_token": None, "add_bos_token": False,
        "additional_special_tokens": list(special), "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"], "chat_template": template,
    }  # fmt: skip
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, "utf-8")


def _plain_text(rng: random.Random) -> Iterator[str]:
    """What the chats say, without the special tokens."""
    for index in range(NUM_CHATS):
        chat: Chat = long_chat(rng) if index % 4 == 0 else short_chat(rng)
        yield "system\n" + (chat.system or "")
        for turn in chat.turns:
            yield "user\n" + turn.user
            yield "assistant\n" + turn.assistant
