"""Recorded traffic: traces that bring their own start times.

    mooncake:FILE   JSON lines: timestamp (ms), input_length, output_length, hash_ids; aiperf's
                    further fields session_id, delay (ms), text_input, messages, tools and extra
    burstgpt:FILE   CSV: Timestamp (s), Request tokens, Response tokens, maybe Session ID; failed
                    rows (no response tokens) are left out
    jsonl:FILE      our own JSON lines: at_s, one of prompt | messages | tokens, max_tokens,
                    session, think_s; any other key goes into the body

Texts. A Mooncake hash id stands for the same `Options.block_size` tokens wherever it occurs, so
equal beginnings of `hash_ids` are equal beginnings of prompts; the last id may be a part of its
block. Blocks begin and end at a border between words, so prompts have exactly the tokens that the
trace says if `Words.is_additive`; for other tokenizers `num_prompt_tokens` says what came out.
Rows of one BurstGPT session begin alike and go on as far as each is long; as in the recording,
each is a request of its own with its own start.

Times count from the first row. A session's later rows have a pause instead (delay, think_s), from
the end of the turn before, and add their prompt to the conversation.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load import lengths
from benchmarks.load.prompts import Options
from benchmarks.load.records import Prompt, Session, Turn
from benchmarks.load.words import Words, number

BLOCK, OWN = 1, 2  # first number of the keys of texts after the seed


class Row(msgspec.Struct):
    """One request of a trace, lengths as recorded."""

    where: str  # file and line, for messages
    at_s: float | None = None
    session: str | None = None
    think_s: float = 0.0
    num_in: int = 0
    num_out: int | None = None
    blocks: tuple[int, ...] = ()  # hash ids
    key: int = 0  # whose text it is, beyond `blocks`
    prompt: Prompt | None = None  # the prompt itself, if the trace has it
    extra: dict[str, Any] = {}


def sessions(spec: str, words: Words | None, options: Options, seed: int) -> list[Session]:
    """The trace `spec` in order of start; `start_s` is None if the file has no times.

    Raises:
        ValueError: the file or a row of it is not as said above; the message has its line.
    """
    kind, _, name = spec.partition(":")
    path = Path(name)
    if not name or not path.is_file():
        raise ValueError(f"{kind}: there is no file {name!r}")
    rows: list[Row] = []
    for row in READERS[kind](path, options):
        if options.max_requests is not None and len(rows) >= options.max_requests:
            break
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: has no request")
    texts = Texts(words, options, seed)
    groups: dict[str | int, list[Row]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(index if row.session is None else row.session, []).append(row)
    timed = [group[0].at_s for group in groups.values() if group[0].at_s is not None]
    if timed and len(timed) != len(groups):
        bare = next(group[0] for group in groups.values() if group[0].at_s is None)
        raise ValueError(f"{bare.where}: has no start time, others have")
    first_s = min(timed, default=0.0)
    found = [_session(group, texts, options, first_s) for group in groups.values()]
    return sorted(found, key=lambda session: session.start_s or 0.0)


class Texts:
    """Prompts of rows; the same for the same seed."""

    def __init__(self, words: Words | None, options: Options, seed: int) -> None:
        self._words = words
        self._options = options
        self._seed = seed
        self._block_tokens = max(1, round(options.block_size * options.input_scale))
        self._blocks: dict[int, list[str]] = {}

    def make(self, row: Row, num_tokens: int, glue: str) -> tuple[Prompt, int]:
        """A prompt of `num_tokens` for `row` after `glue`, and the tokens it came out with."""
        if self._words is None:
            raise ValueError(f"{row.where}: has lengths, which need a tokenizer")
        found: list[str] = []
        for block in row.blocks:
            found += self._block(block)[: num_tokens - len(found)]
            if len(found) == num_tokens:
                break
        missing = num_tokens - len(found)
        if missing:
            found += self._words.fixed((self._seed, OWN, row.key), missing)
        text = glue + " ".join(found)
        if not self._options.as_ids:
            return text, num_tokens if self._words.is_additive else self._words.count(text)
        ids = self._words.ids(text)
        return ids, len(ids)

    def count(self, prompt: Prompt) -> int:
        """Tokens of a prompt that a trace has itself; 0 = unknown."""
        if isinstance(prompt, str):
            return self._words.count(prompt) if self._words else 0
        return len(prompt) if _is_ids(prompt) else 0

    def _block(self, block: int) -> list[str]:
        assert self._words is not None
        if block not in self._blocks:
            key = (self._seed, BLOCK, block)
            self._blocks[block] = self._words.fixed(key, self._block_tokens)
        return self._blocks[block]


def _session(rows: list[Row], texts: Texts, options: Options, first_s: float) -> Session:
    """Rows of one session as turns; turns for which the model has no room are left out."""
    turns: list[Turn] = []
    used = 0
    for index, row in enumerate(rows):
        if index and row.at_s is not None:
            raise ValueError(f"{row.where}: a later turn of a session has a pause, not a start")
        num_out = options.max_tokens if row.num_out is None else row.num_out
        extra = row.extra
        if row.prompt is not None:  # as the file has it: nothing is scaled, cut or added
            made: tuple[Prompt, int] = row.prompt, texts.count(row.prompt)
        else:
            num_in = max(1, round(row.num_in * options.input_scale))
            num_out = max(1, round(num_out * options.output_scale))
            room = options.room(used)
            if index and room is not None and num_in + num_out > room:
                break
            num_in, num_out = lengths.clip(num_in, num_out, room)
            made = texts.make(row, num_in, "" if options.chat or not index else " ")
            extra = options.extra(num_out) | extra
        turns.append(Turn(made[0], num_out, row.think_s * options.time_scale, extra, made[1]))
        used += made[1] + num_out + options.template_tokens
    at_s = rows[0].at_s
    start_s = None if at_s is None else (at_s - first_s) * options.time_scale
    return Session(tuple(turns), start_s)


def _mooncake(path: Path, options: Options) -> Iterator[Row]:
    for index, (where, raw) in enumerate(_json_lines(path)):
        at_ms = _number(raw.pop("timestamp", None), f"{where}: timestamp")
        delay_ms = _number(raw.pop("delay", None), f"{where}: delay")
        session = raw.pop("session_id", None)
        num_out = _whole(raw.pop("output_length", None), f"{where}: output_length", low=0)
        num_in = _whole(raw.pop("input_length", None), f"{where}: input_length", low=1)
        blocks = raw.pop("hash_ids", None) or []
        given = [raw.pop(name, None) for name in ("text_input", "messages")]
        mode = raw.pop("message_mode", "history")
        extra = raw.pop("extra", None) or {}
        tools = raw.pop("tools", None)
        raw.pop("type", None)
        if raw:
            raise ValueError(f"{where}: cannot replay the field {min(raw)!r}")
        if [num_in, *given].count(None) != 2:
            raise ValueError(f"{where}: needs one of input_length, text_input, messages")
        if given[1] is not None and session is not None and mode != "delta":
            raise ValueError(f"{where}: messages of a session must be of message_mode delta")
        _check_blocks(blocks, num_in, options.block_size, where)
        yield Row(
            where=where,
            at_s=None if at_ms is None else at_ms / 1000,
            session=None if session is None else str(session),
            think_s=(delay_ms or 0.0) / 1000,
            num_in=num_in or 0,
            num_out=num_out,
            blocks=tuple(blocks),
            key=index,
            prompt=_literal(given[0], given[1], None, where),
            extra=extra | ({"tools": tools} if tools else {}),
        )


def _check_blocks(blocks: Any, num_in: int | None, block_size: int, where: str) -> None:
    """Hash ids must cover the prompt: anything else is most likely another block size."""
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError(f"{where}: hash_ids must be a list of whole numbers")
    if blocks and (num_in is None or len(blocks) != math.ceil(num_in / block_size)):
        raise ValueError(
            f"{where}: hash_ids has {len(blocks)} blocks for input_length {num_in},"
            f" which is not what a block size of {block_size} gives"
        )


def _burstgpt(path: Path, _: Options) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        names = {name.strip().lower().replace("_", " "): name for name in reader.fieldnames or ()}
        missing = {"timestamp", "request tokens", "response tokens"} - names.keys()
        if missing:
            raise ValueError(f"{path}: has no column {min(missing)!r}")
        session_name = names.get("session id") or names.get("sessionid")
        for raw in reader:
            where = f"{path}:{reader.line_num}"
            at_s = _number(raw[names["timestamp"]], f"{where}: Timestamp")
            num_in = _whole(raw[names["request tokens"]], f"{where}: Request tokens", low=0)
            num_out = _whole(raw[names["response tokens"]], f"{where}: Response tokens", low=0)
            if at_s is None or num_in is None or num_out is None:
                raise ValueError(f"{where}: a column is empty")
            session = raw[session_name] if session_name else None
            if num_out:  # 0 marks a request that failed
                key = number(session) if session else reader.line_num
                yield Row(where=where, at_s=at_s, num_in=num_in, num_out=num_out, key=key)


def _jsonl(path: Path, options: Options) -> Iterator[Row]:
    for where, raw in _json_lines(path):
        session = raw.pop("session", None)
        max_tokens = _whole(raw.pop("max_tokens", None), f"{where}: max_tokens", low=1)
        at_s = _number(raw.pop("at_s", None), f"{where}: at_s")
        think_s = _number(raw.pop("think_s", None), f"{where}: think_s")
        given = [raw.pop(name, None) for name in ("prompt", "messages", "tokens")]
        prompt = _literal(given[0], given[1], given[2], where)
        if given.count(None) != 2 or prompt is None:
            raise ValueError(f"{where}: needs one of prompt, messages, tokens")
        if options.chat and _is_ids(prompt):
            raise ValueError(f"{where}: chat completions take no tokens")
        if not options.chat and given[1] is not None:
            raise ValueError(f"{where}: completions take no messages")
        yield Row(
            where=where,
            at_s=at_s,
            session=None if session is None else str(session),
            think_s=think_s or 0.0,
            prompt=prompt,
            num_out=max_tokens,
            extra=raw,
        )


READERS: dict[str, Callable[[Path, Options], Iterator[Row]]] = {
    "mooncake": _mooncake,
    "burstgpt": _burstgpt,
    "jsonl": _jsonl,
}


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            where = f"{path}:{line_number}"
            if not line.strip():
                continue
            try:
                raw = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise ValueError(f"{where}: is no JSON object: {error}") from None
            yield where, raw


def _literal(text: Any, messages: Any, tokens: Any, where: str) -> Prompt | None:
    """The prompt that a trace brings with it, checked."""
    if text is not None:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: the prompt must be a text")
        return text
    if messages is not None:
        if not messages or not isinstance(messages, list):
            raise ValueError(f"{where}: messages must be a list")
        if not all(isinstance(message, dict) and "role" in message for message in messages):
            raise ValueError(f"{where}: messages must be objects with a role")
        return messages
    if tokens is not None:
        if not tokens or not isinstance(tokens, list) or any(type(t) is not int for t in tokens):
            raise ValueError(f"{where}: tokens must be a list of whole numbers")
        return tokens
    return None


def _is_ids(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], int)


def _number(value: Any, part: str) -> float | None:
    """`value` as a number of at least 0, None where there is none."""
    if value is None or value == "":
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{part}: {value!r} is no number") from None
    if not found >= 0 or math.isinf(found):
        raise ValueError(f"{part}: must be at least 0, not {value}")
    return found


def _whole(value: Any, part: str, low: int) -> int | None:
    found = _number(value, part)
    if found is None:
        return None
    if found != int(found) or found < low:
        raise ValueError(f"{part}: must be a whole number of at least {low}, not {value}")
    return int(found)
