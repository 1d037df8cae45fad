"""Text to tokens: the model's tokenizer and its chat template."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from router.config import TokenizerBackend
from router.text.backend import encode_of
from router.text.encoder import Encoder, cut_pattern
from router.text.output import (
    BY_MODEL,
    ByteDetokenizer,
    Detokenizer,
    Ends,
    OutputText,
    WindowDetokenizer,
    token_bytes,
)
from router.text.template import Templates, read_templates
from worker.config.checkpoint.fields import read_fields
from worker.config.checkpoint.tokens import TokenizerFile, read_tokens
from worker.errors import UserError

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # bytes and spaces as sentencepiece writes them
WORD_MARK = "\u2581"
PROMPT_CHARS, LEAST_CHARS = 32, 1 << 16  # that a template may write: of a token, and in any case
KNOWN_BYTES = 64 << 20  # of texts whose tokens are known, if nobody says how many

log = logging.getLogger("kvlane.tokenizer")


class Text:
    """Tokenizer and template of a Hugging Face model directory; safe to use from any thread.

    `known_bytes`: see Encoder; `backend`: see encode_of. Raises a UserError if a file is missing or
    broken, or the backend cannot be had.
    """

    def __init__(
        self, directory: Path, known_bytes: int = KNOWN_BYTES, backend: TokenizerBackend = "auto"
    ) -> None:
        for name in ("config.json", "tokenizer.json"):
            if not (directory / name).is_file():
                raise UserError(f"{directory} has no {name}", "model.path")
        self.directory = directory
        config = read_fields(directory / "config.json")
        inner = {**config.values, **config.inner("text_config").values}
        tokens = read_tokens(directory)
        if tokens.mended:
            log.info("%s: %s", directory, "; ".join(tokens.mended))
        file = tokens.file
        self._tokenizer = _tokenizer(file)
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)
        self.vocab_size: int = inner.get("vocab_size") or size
        self.model_max_len: int = inner.get("max_position_embeddings") or 1 << 30
        # A longer prompt cannot fit, unless it is of little but the longest tokens.
        most = self.model_max_len * min(self.max_token_chars, PROMPT_CHARS)
        sources = read_templates(directory, tokens.config)
        try:
            self.templates = Templates(sources, tokens.named, max(most, LEAST_CHARS))
        except jinja2.TemplateSyntaxError as error:
            message = f"{directory}: its chat template is broken: {error}"
            raise UserError(message, "model.path") from error
        self.template_source = self.templates.source
        self.probe = self.templates.probe
        self.response_template: Any = tokens.config.get("response_template")
        added = self._tokenizer.get_added_tokens_decoder()
        self.added = {i: token.content for i, token in added.items()}
        self._added_ids = {content: i for i, content in self.added.items()}
        # Of tokens that the model has no embedding for: no prompt may have them.
        self.unknown_ids = {i: text for i, text in self.added.items() if i >= self.vocab_size}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder: dict[str, Any] = file.fields.get("decoder") or {}
        self._is_byte_level: bool = decoder.get("type") == "ByteLevel"
        begins = {content for content in self._added_ids if content in self.template_source}
        begins |= set(tokens.named.values())
        cuts = cut_pattern(self._tokenizer, file.fields, begins)
        encode = encode_of(file, self._tokenizer, backend)
        self.encoder = Encoder(encode, self._tokenizer, cuts, known_bytes)
        self._token_bytes = cache(self._bytes_of)
        self._token_text = cache(self._text_of)

    def encode(self, text: str, *, add_special_tokens: bool, salt: str = "") -> tuple[int, ...]:
        """Token ids of `text`; `add_special_tokens`: with those that the tokenizer adds."""
        return self.encoder.encode(text, add_special_tokens=add_special_tokens, salt=salt)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `tokens`; the pieces of a `Detokenizer` must add up to it."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt of a chat, special tokens written out; `options`: of `ChatTemplate.render`.

        Raises a UserError if there is no template, or it refuses these messages.
        """
        return self.templates.of(tools=bool(options.get("tools"))).render(messages, **options)

    def output(
        self, prompt: Sequence[int], ends: Ends = BY_MODEL, skip: frozenset[int] | None = None
    ) -> OutputText:
        """The text of an answer to `prompt`. Tokens in `skip` leave none; None: special ones."""
        skip = self.special_ids if skip is None else skip
        return OutputText(self._detokenizer(prompt, skip), ends)

    def special_ids_but(self, contents: Sequence[str]) -> frozenset[int]:
        """The special tokens, without those of these contents."""
        return frozenset(i for i in self.special_ids if self.added[i] not in contents)

    def token_of(self, content: str) -> int | None:
        """The added token with this content."""
        return self._added_ids.get(content)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token by itself."""
        if token in self.added or self._is_byte_level:
            return self._token_bytes(token)
        piece = self.piece(token)
        if BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(WORD_MARK, " ").encode()

    def piece(self, token: int) -> str:
        """A token as it stands in the vocabulary; empty when it has no entry."""
        return (self._tokenizer.id_to_token(token) if token < self.vocab_size else None) or ""

    def _detokenizer(self, prompt: Sequence[int], skip: frozenset[int]) -> Detokenizer:
        if self._is_byte_level:
            return ByteDetokenizer(self._token_bytes, self._token_text, skip)
        decode = partial(self.decode, skip_special_tokens=False)
        return WindowDetokenizer(decode, prompt, skip)

    def _bytes_of(self, token: int) -> bytes:
        return token_bytes(self.piece(token))

    def _text_of(self, token: int) -> str | None:
        """The text of a token whose bytes are whole characters."""
        try:
            return self._token_bytes(token).decode()
        except UnicodeDecodeError:
            return None


def _tokenizer(file: TokenizerFile) -> Tokenizer:
    try:
        return Tokenizer.from_str(file.text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{file.path}: not a tokenizer: {error}", "model.path") from error
