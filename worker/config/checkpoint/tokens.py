"""A model's tokenizer.json with the tokens that only the other files of its directory have.

These are the rules of transformers 5.24 (`PreTrainedTokenizerBase._from_pretrained`,
`TokenizersBackend.__init__`), so that ids are those of its AutoTokenizer: `added_tokens_decoder` of
tokenizer_config.json counts in place of special_tokens_map.json and added_tokens.json, its flags
before those of tokenizer.json; what is new gets the next ids; named tokens are special. Truncation
and padding, with which a tokenizer was saved in training, are switched off.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

from worker.config.checkpoint.fields import Fields, is_list, read_fields
from worker.errors import UserError

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
EOS = "eos_token"
NAMES = ("bos_token", EOS, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA, OLDER_EXTRA, OWN, DECODER = (
    "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens",
    "added_tokens_decoder",
)  # fmt: skip
FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")

Token = dict[str, Any]  # content and FLAGS, as tokenizer.json has them


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer.json; all that reads it gets the same text."""

    path: Path
    text: str
    fields: Mapping[str, Any]  # of `text`

    def id_of(self, content: str) -> int | None:
        """The id of an added token, or of an entry of the vocabulary."""
        added: list[Token] = self.fields.get("added_tokens") or []
        found = next((token["id"] for token in added if token["content"] == content), None)
        model: dict[str, Any] = self.fields.get("model") or {}
        vocab: dict[str, int] | list[tuple[str, float]] = model.get("vocab") or {}
        if found is not None:
            return found
        if isinstance(vocab, dict):
            return vocab.get(content)
        return next((i for i, (piece, _) in enumerate(vocab) if piece == content), None)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a model directory says of its tokens."""

    file: TokenizerFile
    config: Fields  # tokenizer_config.json
    named: Mapping[str, str]  # special tokens by name: bos_token and the like
    mended: tuple[str, ...] = ()  # what differs from tokenizer.json as it stands there, in words


def read_tokens(directory: Path) -> Tokens:
    """Raises a UserError if a file is malformed, an OSError if tokenizer.json cannot be read."""
    path = directory / "tokenizer.json"
    text, read = path.read_text(encoding="utf-8"), _Read(directory)
    file, mended = read.file, list[str]()
    if off := [name for name in ("truncation", "padding") if file.get(name)]:
        mended.append(f"{' and '.join(off)} of tokenizer.json: switched off")
    if read.new:
        contents = ", ".join(repr(token["content"]) for token in read.new)
        mended.append(f"tokens that other files have, or have otherwise: {contents}")
    if not mended:
        return Tokens(TokenizerFile(path, text, file.values), read.config, read.named)
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = [AddedToken(**token) for token in read.new]
        tokenizer.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]
        text = tokenizer.to_str()
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: not a tokenizer: {error}", "model.path") from error
    fields = json.loads(text)
    return Tokens(TokenizerFile(path, text, fields), read.config, read.named, tuple(mended))


def eos_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """The tokenizer's end of a text, if there is a tokenizer that names one the model has."""
    if not (directory / "tokenizer.json").is_file():
        return ()
    read = _Read(directory)
    content = read.named.get(EOS)
    found = TokenizerFile(directory, "", read.file.values).id_of(content) if content else None
    if content and found is None:  # a token that tokenizer.json lacks gets its id by being added
        found = read_tokens(directory).file.id_of(content)
    return () if found is None or found >= vocab_size else (found,)


class _Read:
    """What a directory's files say, before any token is added."""

    def __init__(self, directory: Path) -> None:
        self.file = file = read_fields(directory / "tokenizer.json")
        self.config = config = _read(directory / "tokenizer_config.json")
        if config.get("split_special_tokens"):
            reason = "prompts need special tokens whole; take the field out, or set it to false"
            raise config.unsupported("split_special_tokens", reason)
        asked = _Asked(config, directory)
        padding: dict[str, Any] = file.get("padding") or {}
        if "pad_token" in padding and "pad_token" not in config.values:
            asked.named.setdefault("pad_token", asked.token(padding["pad_token"], special=True))
        held: list[Token] = file.get("added_tokens") or []
        if not is_list(held) or not all(map(_has_content, held)):
            raise file.error("added_tokens", "not a tokenizer: must be a list of tokens")
        self.new = _changed(asked.tokens(held), held)
        self.named = {name: token["content"] for name, token in asked.named.items()}


class _Asked:
    """The tokens that the files beside tokenizer.json name."""

    def __init__(self, config: Fields, directory: Path) -> None:
        self._config = config
        self._added: Fields | None = None  # added_tokens.json, where it counts
        values = dict(config.values)
        if values.get(OLDER_EXTRA) and not values.get(EXTRA):
            values[EXTRA] = values.pop(OLDER_EXTRA)
        own = {name: token for name, token in values.items() if _is_own(name, token)}
        own = own | _taken(values, EXTRA) or _taken(values, OWN)
        special: Mapping[str, Any] = {}
        if DECODER not in values:
            self._added = _read(directory / "added_tokens.json")
            special = _read(directory / "special_tokens_map.json").values
            listed: Any = values.get(EXTRA)
            values |= special
            if is_list(listed) and is_list(special.get(EXTRA)):
                values[EXTRA] = [*listed, *special[EXTRA]]
            own |= _taken(values, EXTRA)
        named = {name: values.get(name) for name in NAMES}
        first = [name for name in values if name not in own or name in special]
        named |= {
            name: values[name] for name in first if _is_own(name, values[name], any_form=True)
        }
        named |= own
        self.named = {
            name: self.token(token, name, special=True)
            for name, token in named.items()
            if token is not None
        }
        extra: Any = values.get(EXTRA, values.get(OLDER_EXTRA)) or []
        if not is_list(extra):
            raise config.error(EXTRA, f"must be a list or an object of tokens, not {extra!r}")
        self.extra = [self.token(token, EXTRA) for token in extra]

    def token(self, value: Any, name: str = "", *, special: bool | None = None) -> Token:
        """A token from its text, or from its object; `special` counts before the object's own."""
        given: dict[str, Any] = {"content": value} if isinstance(value, str) else value
        if not _has_content(given):
            raise self._config.error(name, f"must be a token, not {value!r}")
        if special is None:
            special = given.get("special", True) is True
        token = dict.fromkeys(FLAGS, False) | {"normalized": not special}
        token |= {flag: given[flag] for flag in FLAGS if isinstance(given.get(flag), bool)}
        return token | {"content": given["content"], "special": special}

    def tokens(self, held: list[Token]) -> Iterator[Token]:
        """All of them in the order in which new ones get ids. held: what tokenizer.json has."""
        named = {token["content"] for token in self.named.values()}
        known = {token["content"] for token in held}
        for _, token in sorted(self._by_id(held).items()):
            known.add(token["content"])
            yield token | {"special": token["special"] or token["content"] in named}
        for token in chain(self.named.values(), self.extra):
            if token["content"] not in known:
                known.add(token["content"])
                yield token

    def _by_id(self, held: list[Token]) -> dict[int, Token]:
        if self._added is None:
            listed = self._config.inner(DECODER)
            return {
                _id(listed, key): self.token(token, f"{DECODER}.{key}", special=_is_special(token))
                for key, token in listed.values.items()
            }
        special = {token["content"] for token in chain(self.named.values(), self.extra)}
        found = dict[int, Token]()
        for content in self._added.values:
            number = self._added.integer(content, least=0)
            found[number] = self.token(content, special=content in special)
        return found | {
            token["id"]: self.token(token, special=_is_special(token)) for token in held
        }


def _changed(tokens: Iterator[Token], held: list[Token]) -> list[Token]:
    """Those that are not held as they are; of two with one content the last counts."""
    kept = {token["content"]: token for token in held}
    asked = {token["content"]: token for token in tokens}
    return [
        token
        for content, token in asked.items()
        if content not in kept or any(kept[content].get(k) != v for k, v in token.items())
    ]


def _is_own(name: str, token: Any, *, any_form: bool = False) -> bool:
    """Whether a field names a token of this model alone, as a text or in any form."""
    is_token = isinstance(token, str) or (any_form and _has_content(token))
    return is_token and name.endswith("_token") and name not in NAMES


def _taken(values: dict[str, Any], field: str) -> dict[str, Any]:
    """Takes a field out of `values`, where it is an object: tokens by their names."""
    is_object = isinstance(values.get(field), dict)
    return cast("dict[str, Any]", values.pop(field)) if is_object else {}


def _has_content(token: Any) -> bool:
    return isinstance(token, dict) and isinstance(cast("Token", token).get("content"), str)


def _is_special(token: Any) -> bool:
    return isinstance(token, dict) and cast("Token", token).get("special") is True


def _id(fields: Fields, key: str) -> int:
    if not key.isdecimal():
        raise fields.error(key, "must be a token id")
    return int(key)


def _read(path: Path) -> Fields:
    return read_fields(path) if path.exists() else Fields(path, {})
