"""Text to tokens: the model's tokenizer and its chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import jinja2
from tokenizers import Tokenizer

from router.config import TokenizerBackend
from router.text.backend import TokenizerFile, encode_of
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
from router.text.probe import Probe
from router.text.template import ChatTemplate
from worker.errors import UserError

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # bytes and spaces as sentencepiece writes them
WORD_MARK = "\u2581"
KNOWN_BYTES = 64 << 20  # of texts whose tokens are known, if nobody says how many
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


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
        config = _json(directory / "config.json")
        config |= config.get("text_config") or {}
        named = _json(directory / "tokenizer_config.json")
        path = directory / "tokenizer.json"
        described = path.read_text(encoding="utf-8")
        file = TokenizerFile(path, described, _object(path, described))
        self._tokenizer = _tokenizer(file)
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)
        self.vocab_size: int = config.get("vocab_size") or size
        self.model_max_len: int = config.get("max_position_embeddings") or 1 << 30
        special = {name: _content(named[name]) for name in SPECIAL_NAMES if named.get(name)}
        source = _template_source(directory, named)
        self.template_source = source or ""
        try:
            self._template = None if source is None else ChatTemplate(source, special)
        except jinja2.TemplateSyntaxError as error:
            message = f"{directory}: its chat template is broken: {error}"
            raise UserError(message, "model.path") from error
        # What the template that is used with tools makes of calls.
        self.probe = Probe() if self._template is None else self._template.probe
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._added_ids = {content: i for i, content in self._added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder: dict[str, Any] = file.fields.get("decoder") or {}
        self._is_byte_level: bool = decoder.get("type") == "ByteLevel"
        begins = {content for content in self._added_ids if content in self.template_source}
        begins |= set(special.values())
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
        if self._template is None:
            raise UserError("this model has no chat template; use /v1/completions", "messages")
        return self._template.render(messages, **options)

    def output(
        self, prompt: Sequence[int], ends: Ends = BY_MODEL, skip: frozenset[int] | None = None
    ) -> OutputText:
        """The text of an answer to `prompt`. Tokens in `skip` leave none; None: special ones."""
        skip = self.special_ids if skip is None else skip
        return OutputText(self._detokenizer(prompt, skip), ends)

    def special_ids_but(self, contents: Sequence[str]) -> frozenset[int]:
        """The special tokens, without those of these contents."""
        return frozenset(i for i in self.special_ids if self._added[i] not in contents)

    def token_of(self, content: str) -> int | None:
        """The added token with this content."""
        return self._added_ids.get(content)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token by itself."""
        if token in self._added or self._is_byte_level:
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


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    return _object(path, path.read_text(encoding="utf-8")) if path.is_file() else {}


def _object(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}", "model.path") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object", "model.path")
    return cast("dict[str, Any]", value)


def _tokenizer(file: TokenizerFile) -> Tokenizer:
    try:
        return Tokenizer.from_str(file.text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{file.path}: not a tokenizer: {error}", "model.path") from error


def _content(token: Any) -> str:
    """Special tokens are written as a string or as {"content": ...}."""
    return cast("dict[str, str]", token)["content"] if isinstance(token, dict) else str(token)


def _template_source(directory: Path, named: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins; a list of named templates is asked for "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = named.get("chat_template")
    if isinstance(source, list):
        entries = cast("list[dict[str, str]]", source)
        return {entry["name"]: entry["template"] for entry in entries}.get("default")
    return source


def text_of_parts(parts: Sequence[Mapping[str, Any]], param: str) -> str:
    """The text of `parts`, the content of a message; a UserError for `param` if one is not text."""
    texts: list[str] = []
    for part in parts:
        if part.get("type") not in ("text", "refusal"):
            message = f"content parts of type {part.get('type')!r} are not supported"
            raise UserError(message, param)
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise UserError("a content part of type text needs a string in `text`", param)
        texts.append(text)
    return "\n".join(texts)
