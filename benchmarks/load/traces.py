"""Recorded traffic: traces that bring their own start times.

    mooncake:FILE   JSON lines: timestamp (ms), input_length, output_length, hash_ids; aiperf's
                    further fields session_id, delay (ms), text_input, messages, tools, payload (a
                    whole body with messages) and extra
    weka:FILE       JSON lines, one a session, as InferenceX' AgentX replays them: block_size,
                    hash_id_scope, and requests of t (s), in, out, hash_ids and think_time (s); a
                    request of type subagent has requests of its own, which are a session
    burstgpt:FILE   CSV: Timestamp (s), Request tokens, Response tokens, maybe Session ID; failed
                    rows (no response tokens) are left out

A Mooncake hash id stands for the same `Options.block_size` tokens wherever it occurs; the last id
may be a part of its block. Prompts have exactly the tokens that the trace says if
`Words.is_additive`; for other tokenizers `num_prompt_tokens` says how many they have. Rows of one
BurstGPT session begin alike; each is a request of its own with its own start.

A prompt of Weka's is the whole conversation, answers that were recorded among it: what the server
has said is dropped, so its KV is of no use to the next turn, as with any client that edits it.

Times count from the first row. A session's later rows have a pause instead (delay), from the end of
the turn before, and add their prompt to the conversation.
"""

import csv
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from benchmarks.load import lengths
from benchmarks.load.prompts import MAX_TOKENS, TEMPLATE_TOKENS, Options, exactly
from benchmarks.load.records import Prompt, Session, Turn
from benchmarks.load.words import Words, text_number

AtLeastZero = Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # a CSV file may say inf
SCOPE = 1 << 40  # above all hash ids of a session
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
    block_size: int = 0  # of `blocks`; 0: as `Options` says
    is_whole: bool = False  # see `Turn`
    extra: dict[str, Any] = {}


def sessions(spec: str, words: Words | None, options: Options, seed: int) -> list[Session]:
    """The trace `spec` in order of start; `start_s` is None if the file has no times.

    Raises ValueError, with its line, if the file or a row of it is not as said above.
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
    drawn = [_session(group, texts, options, first_s) for group in groups.values()]
    return sorted(drawn, key=lambda session: session.start_s or 0.0)


class Texts:
    """Prompts of rows; the same for the same seed."""

    def __init__(self, words: Words | None, options: Options, seed: int) -> None:
        self._words = words
        self._seed = seed
        self._options = options
        self._blocks: dict[tuple[int, int], list[str]] = {}

    def make(self, row: Row, num_tokens: int, glue: str) -> tuple[str, int]:
        """A prompt of `num_tokens` for `row` after `glue`, and the tokens it came out with."""
        if self._words is None:
            raise ValueError(f"{row.where}: has lengths, which need a tokenizer")
        drawn: list[str] = []
        for block in row.blocks:
            drawn += self._block(block, row.block_size or self._options.block_size)[
                : num_tokens - len(drawn)
            ]
            if len(drawn) == num_tokens:
                break
        missing = num_tokens - len(drawn)
        if missing:
            drawn += self._words.fixed((self._seed, OWN, row.key), missing)
        text = glue + " ".join(drawn)
        return text, num_tokens if self._words.is_additive else self._words.count(text)

    def count(self, prompt: Prompt) -> int:
        """Tokens of a prompt that a trace has itself; 0 = unknown."""
        return self._words.count(prompt) if self._words and isinstance(prompt, str) else 0

    def _block(self, block: int, size: int) -> list[str]:
        assert self._words is not None
        num = max(1, round(size * self._options.input_scale))
        if (block, num) not in self._blocks:
            self._blocks[block, num] = self._words.fixed((self._seed, BLOCK, block), num)
        return self._blocks[block, num]


def _session(rows: list[Row], texts: Texts, options: Options, first_s: float) -> Session:
    """Rows of one session as turns; turns for which the model has no room are left out."""
    turns: list[Turn] = []
    used = 0
    for index, row in enumerate(rows):
        if index and row.at_s is not None:
            raise ValueError(f"{row.where}: a later turn of a session has a pause, not a start")
        num_out = MAX_TOKENS if row.num_out is None else row.num_out
        extra = row.extra
        if row.prompt is not None:  # as the file has it: nothing is scaled, cut or added
            made: tuple[Prompt, int] = row.prompt, texts.count(row.prompt)
        else:
            num_in = max(1, round(row.num_in * options.input_scale))
            num_out = max(1, num_out)
            room = options.room(0 if row.is_whole else used)
            if index and room is not None and num_in + num_out > room:
                break
            num_in, num_out = lengths.clip(num_in, num_out, room)
            glue = "" if options.chat or not index or row.is_whole else " "
            made = texts.make(row, num_in, glue)
            extra = exactly(num_out) | extra
        think_s = row.think_s * options.time_scale
        turns.append(Turn(made[0], num_out, think_s, extra, made[1], row.is_whole))
        used += made[1] + num_out + TEMPLATE_TOKENS
    at_s = rows[0].at_s
    start_s = None if at_s is None else (at_s - first_s) * options.time_scale
    return Session(tuple(turns), start_s)


class Mooncake(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a Mooncake trace; what aiperf has beyond Mooncake's own four fields follows."""

    timestamp: AtLeastZero | None = None  # ms
    input_length: Annotated[int, msgspec.Meta(ge=1)] | None = None  # tokens
    output_length: Annotated[int, msgspec.Meta(ge=0)] | None = None  # tokens
    hash_ids: list[int] = []
    session_id: str | int | None = None
    delay: AtLeastZero = 0.0  # ms
    text_input: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)] | None = None
    message_mode: str = "history"
    tools: list[Any] = []
    extra: dict[str, Any] = {}
    type: str | None = None
    payload: dict[str, Any] = {}

    def check(self, options: Options) -> None:
        """Raises ValueError if its fields do not fit each other."""
        if self.payload:  # a whole body
            self.messages, self.tools = self.payload.get("messages"), []
            limits = ("max_completion_tokens", "max_tokens")
            given = next((self.payload[n] for n in limits if self.payload.get(n)), None)
            self.output_length = self.output_length if given is None else given
            fixed = {"messages", "model", "stream", "stream_options", *limits}
            self.extra = {k: v for k, v in self.payload.items() if k not in fixed} | self.extra
        if [self.input_length, self.text_input, self.messages].count(None) != 2:
            raise ValueError("needs one of input_length, text_input, messages, payload")
        for message in self.messages or ():
            if "role" not in message:
                raise ValueError("messages must be objects with a role")
        if self.messages is not None and not options.chat:
            raise ValueError("completions take no messages")
        in_session = self.messages is not None and self.session_id is not None and not self.payload
        if in_session and self.message_mode != "delta":
            raise ValueError("messages of a session must be of message_mode delta")
        # Anything else is most likely another block size.
        num_blocks = math.ceil((self.input_length or 0) / options.block_size)
        if self.hash_ids and len(self.hash_ids) != num_blocks:
            raise ValueError(
                f"hash_ids has {len(self.hash_ids)} blocks for input_length {self.input_length},"
                f" which is not what a block size of {options.block_size} gives"
            )


def _mooncake(path: Path, options: Options) -> Iterator[Row]:
    decode = msgspec.json.Decoder(Mooncake).decode
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                raw = decode(line)
                raw.check(options)
            except ValueError as error:  # msgspec's errors are such
                raise ValueError(f"{where}: {error}") from None
            yield Row(
                where=where,
                at_s=None if raw.timestamp is None else raw.timestamp / 1000,
                session=None if raw.session_id is None else str(raw.session_id),
                think_s=raw.delay / 1000,
                num_in=raw.input_length or 0,
                num_out=raw.output_length,
                blocks=tuple(raw.hash_ids),
                key=number - 1,
                prompt=raw.text_input or raw.messages,
                extra=raw.extra | ({"tools": raw.tools} if raw.tools else {}),
                is_whole=bool(raw.payload),
            )


class Weka(msgspec.Struct):
    """One request of a session, or a subagent's session within it."""

    type: str = "n"
    t: AtLeastZero = 0.0  # s
    num_in: Annotated[int, msgspec.Meta(ge=1)] = msgspec.field(default=1, name="in")  # tokens
    num_out: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(default=1, name="out")
    hash_ids: list[int] = []
    think_time: AtLeastZero = 0.0  # s, from the end of the request before
    requests: "list[Weka]" = []


class WekaSession(msgspec.Struct):
    """One line."""

    block_size: Annotated[int, msgspec.Meta(ge=1)]
    requests: Annotated[list[Weka], msgspec.Meta(min_length=1)]
    hash_id_scope: Literal["local", "global"] = "local"


def _weka(path: Path, options: Options) -> Iterator[Row]:
    decode = msgspec.json.Decoder(WekaSession).decode

    def rows(asked: list[Weka], name: str, whose: int, line: WekaSession) -> Iterator[Row]:
        """Of one session, then of its subagents'."""
        own = [each for each in asked if each.type != "subagent"]
        for index, each in enumerate(own):
            num_blocks = math.ceil(each.num_in / line.block_size)
            if len(each.hash_ids) not in (0, num_blocks):
                told = f"hash_ids has {len(each.hash_ids)} blocks, in has {num_blocks}"
                raise ValueError(f"{name}: {told}")
            scope = whose * SCOPE if line.hash_id_scope == "local" else 0
            yield Row(
                where=name, session=name, think_s=each.think_time if index else 0.0,
                num_in=each.num_in, num_out=each.num_out, key=text_number(name),
                blocks=tuple(block + scope for block in each.hash_ids),
                block_size=line.block_size, is_whole=True,
            )  # fmt: skip
        for index, each in enumerate(each for each in asked if each.type == "subagent"):
            yield from rows(each.requests, f"{name}.{index}", whose, line)

    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                try:
                    line = decode(raw)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
                yield from rows(line.requests, f"{path}:{number}", number, line)


class BurstGPT(
    msgspec.Struct,
    rename={
        "at_s": "timestamp",
        "num_in": "request tokens",
        "num_out": "response tokens",
        "session": "session id",
    },
):
    """One row of a BurstGPT trace, its columns in lower case."""

    at_s: AtLeastZero
    num_in: Annotated[int, msgspec.Meta(ge=0)]
    num_out: Annotated[int, msgspec.Meta(ge=0)]  # 0 marks a request that failed
    session: str = ""


def _burstgpt(path: Path, _: Options) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            try:
                raw = msgspec.convert(
                    {name.strip().lower(): cell for name, cell in cells.items() if name},
                    BurstGPT,
                    strict=False,
                )
            except msgspec.ValidationError as error:
                raise ValueError(f"{where}: {error}") from None
            if raw.num_out:
                key = text_number(raw.session) if raw.session else reader.line_num
                yield Row(
                    where=where, at_s=raw.at_s, num_in=raw.num_in, num_out=raw.num_out, key=key
                )


READERS: dict[str, Callable[[Path, Options], Iterator[Row]]] = {
    "mooncake": _mooncake,
    "weka": _weka,
    "burstgpt": _burstgpt,
}
