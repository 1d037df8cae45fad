"""Structured output: constraints composed to one llguidance grammar for the worker.

A grammar is checked here against the model's own tokenizer, so that a schema that no output can
meet is the client's error (400) and never a worker's.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from llguidance import LLMatcher

from router.errors import invalid, unsupported
from router.text.bounded import Bounds, TooLarge, bounded, grammar_of
from router.text.ebnf import Bad, lark_of
from router.text.exact import Unkept, exact_part
from router.text.forms.form import ID
from router.text.forms.schema import Schema, at
from router.text.keywords import kept
from router.text.trial import Trials, Verdict
from worker.errors import contained

MAX_GRAMMAR_CHARS = 1 << 18
NOTHING = json.dumps({"grammars": [{"lark_grammar": 'start: ""'}]})
ANY = "(?s:.*)"  # text, as a pattern
# Texts and patterns of a lark grammar, or what it names.
NAMED = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(<[^<>\s]+>)')
UNKEPT = re.compile(r"Unimplemented keys: (\[.*?\])")

Part = dict[str, Any]  # an entry of llguidance's list of grammars


def schema_part(
    schema: Any, param: str, bounds: Bounds, *, lenient: bool = False, told: list[str] | None = None
) -> Part:
    """A JSON schema, closed and bounded; raises an ApiError if this is none.

    Paths, from `param` on, of what it does not keep to are added to `told`; if not
    lenient, there is nothing such. JSON is compact: a model that may add white space sometimes
    adds it without end.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise invalid(f"{param}: not a JSON schema", param) from None
    if not isinstance(schema, dict):
        raise invalid(f"{param}: a JSON schema is an object", param)
    options: dict[str, Any] = {"whitespace_flexible": False}
    if lenient:
        options["lenient"] = True
    try:
        mended = kept(cast("dict[str, Any]", schema), bounds.tried, strict=not lenient)
        closed = bounded(mended.schema, bounds) | {"x-guidance": options}
        rules = exact_part(closed)
    except RecursionError:
        raise invalid(f"{param}: nested too deeply", param) from None
    except TooLarge:
        raise invalid(f"{param}: its references name too many properties", param) from None
    except Unkept as error:
        raise invalid(at(param, str(error)), param) from None
    if told is not None:
        told += [at(param, where) for where in mended.told]
    return {"json_schema": closed} if rules is None else {"lark_grammar": rules}


def regex_part(pattern: str) -> Part:
    """A regular expression, as llguidance writes it in a grammar."""
    grammar = json.loads(LLMatcher.grammar_from_regex(pattern))
    return {"lark_grammar": grammar["grammars"][0]["lark_grammar"]}


def ebnf_part(text: str, param: str) -> Part:
    """A grammar as llama.cpp, xgrammar and SGLang write it; raises an ApiError if it is none."""
    try:
        return {"lark_grammar": lark_of(text)}
    except Bad as error:
        raise invalid(f"{param}: {str(error)[:1000]}", param) from None


def unkept(warnings: Iterable[str]) -> Iterator[str]:
    """The keywords of schemas that llguidance's warnings are about."""
    for words in warnings:
        listed = UNKEPT.match(words)
        if listed:
            yield from json.loads(listed[1])
        else:
            yield "format" if words.startswith("Unknown format") else words.partition(" ")[0]


def quoted(text: str) -> str:
    """A string of a lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def regex(text: str) -> str:
    """A pattern of `text`, as a lark grammar has it."""
    text = re.sub(r"([\\.^$*+?{}\[\]|()/])", r"\\\1", text)
    return text.replace("\n", r"\n").replace("\t", r"\t").replace("\r", r"\r")


class Spelling:
    """How texts stand in a lark grammar for one tokenizer.

    tokens: ids, by what they say, of special tokens: no text of a grammar matches them, so each has
    to be named where it stands. added: those of all added tokens.
    """

    def __init__(self, tokens: Mapping[str, int], added: Mapping[str, int] | None = None) -> None:
        self._tokens, self._added = tokens, added or {}
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def pieces(self, text: str) -> list[str | int]:
        """`text` as texts and tokens."""
        found = filter(None, self._cut.split(text))
        return [self._tokens.get(piece, piece) for piece in found]

    def by_id(self, lark: str) -> str:
        """A lark grammar that names added tokens, as <…>, with their ids: some are no names."""
        ids = self._added
        return NAMED.sub(lambda n: f"<[{ids[n[1]]}]>" if n[1] in ids else n[0], lark)

    def piece(self, piece: str | int) -> str:
        """One of them in a rule."""
        return quoted(piece) if isinstance(piece, str) else f"<[{piece}]>"

    def literal(self, text: str) -> str:
        """`text` in a rule, with any id where one stands in it; empty, if it is."""
        parts = (" ".join(map(self.piece, self.pieces(part))) for part in text.split(ID))
        return " call_id ".join(parts).strip()


def composed(parts: Sequence[tuple[str, Part]], rules: Sequence[str], think: str = "") -> str:
    """One grammar of the lark `rules`, which refer to `parts` as @name; `body` is the answer.

    `think` has the rules of the reasoning before the answer; empty: there is none.
    """
    start = "start: think body" if think else "start: body"
    lark = "\n".join([start, *([think] if think else []), *rules])
    named = [{"name": name, **part} for name, part in parts]
    return json.dumps({"grammars": [{"lark_grammar": lark}, *named]})


def think_rules(
    begin: str, end: str, spelling: Spelling, *, opened: bool, without: str = ""
) -> str:
    """The lark rules of reasoning between `begin` and `end`, before an answer.

    `opened`: the prompt has opened it; if not, the answer may begin with it. without: a pattern of
    what it does not hold.
    """
    thought = between("thought", "" if opened else begin, end, spelling, without)
    think = "think: thought space" if opened else "think: (thought space)?"
    return "\n".join([think, *thought, r"space: /[ \n]{0,4}/"])


def between(
    name: str, begin: str, end: str, spelling: Spelling, without: str = ""
) -> tuple[str, str]:
    """The rule `name` of any text between two marks, with these, and its terminal.

    A token of its own ends it alone; if a mark is spelled, it does so where it stands first.
    """
    key, never = name.upper(), f" & ~/{ANY}{without}{ANY}/" if without else ""
    opens, closes = map(spelling.pieces, (begin, end))
    if all(len(parts) == 1 and isinstance(parts[0], int) for parts in (opens or closes, closes)):
        ends = spelling.literal(end)
        return f"{name}: {spelling.literal(begin)} {key} {ends}", f"{key}: /{ANY}/{never}"
    return f"{name}[lazy]: {key}", f"{key}: /{regex(begin)}{ANY}{regex(end)}/{never}"


class Validator:
    """Says whether a model can follow a grammar; only who tries reads the tokenizer."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._trials = Trials(directory, vocab_size)

    def require(self, param: str) -> None:
        """Raise an ApiError, 400, if llguidance cannot use this model's tokenizer."""
        verdict = self._verdict(NOTHING)
        if not verdict.is_usable:
            raise unsupported(f"{param}: no grammars for this model: {verdict.error}", param)

    @property
    def is_usable(self) -> bool:
        """Whether `require` raises nothing."""
        return self._verdict(NOTHING).is_usable

    def check(self, grammar: str, param: str) -> tuple[str, ...]:
        """llguidance's warnings of what it does not keep to.

        Raises an ApiError, 400, for a grammar that is malformed or that no output satisfies.
        """
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise invalid(f"{param}: longer than {MAX_GRAMMAR_CHARS} characters", param)
        verdict = self._verdict(grammar)
        if verdict.error:
            raise invalid(f"{param}: {verdict.error[:1000]}", param)
        return verdict.warnings

    def tried(self, schema: Schema) -> str:
        """Why llguidance cannot read a schema, if it cannot; also that it costs too much."""
        verdict = self._verdict(grammar_of(schema))
        return verdict.error if verdict.is_usable else ""  # `require` says so

    def _verdict(self, grammar: str) -> Verdict:
        with contained("llguidance"):
            return self._trials.verdict(grammar)
