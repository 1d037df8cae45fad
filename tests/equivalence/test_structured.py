"""Structured output always parses and validates: hundreds of schemas through a decode worker."""

import functools
import json
import random
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from router.text.bounded import Bounds
from router.text.grammar import composed, schema_part
from tests.support import pairwise
from tests.support.engines import Answer, running
from tests.support.laws import sections
from tests.support.prompts import EOS, chat_ids, ll_tokenizer, tokenizer
from tests.support.shallow import shallow
from worker.api import FinishReason, Sampling
from worker.draw import changes

NUM_GENERATED = 480 if pairwise.whole else 80
BATCH = 130
MAX_TOKENS = 220
PATTERNS = (
    "^[a-z]{2,6}$",
    "^[A-Z][0-9]{3}$",
    "^(red|green|blue)-[0-9]$",
    r"^\d{4}-\d{2}$",
    "^a+b?$",
)
Schema = dict[str, object]


def closed(properties: Schema, required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


POINT = closed(
    {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "y": {"type": "null"}}, ["x"]
)
WRITTEN: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"const": {"a": [1, "two", None]}},
    {"enum": ["a", 1, None, True, {"k": []}, "with \"quotes\" and \\"]},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": ["string", "null"], "maxLength": 12},
    {"type": "integer", "minimum": 17, "maximum": 17},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3},
    {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 7},
    {"type": "number", "minimum": 0.5, "maximum": 1.5},
    {"type": "array", "maxItems": 0},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 4, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False,
     "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 2},
     "maxItems": 3},
    closed({}, []),
    closed({"a": {"type": "boolean"}}, []),
    closed({"a b": {"const": 1}, "ünïcode": {"const": "ß"}, "\"": {"const": None}},
           ["a b", "ünïcode", "\""]),
    closed({f"p{i}": {"type": "boolean"} for i in range(12)}, []),
    closed({f"p{i}": {"enum": [i, "n"]} for i in range(12)}, [f"p{i}" for i in range(12)]),
    {"type": "object", "additionalProperties": {"type": "boolean"}, "properties": {},
     "maxProperties": 2},
    {"$ref": "#/$defs/point", "$defs": {"point": POINT}},
    {"$defs": {"point": POINT}, "type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 3},
    {"$defs": {"tree": closed({"v": {"type": "boolean"}, "kids": {
        "type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}, ["v"])},
     "$ref": "#/$defs/tree"},
    {"$defs": {"list": {"anyOf": [{"type": "null"}, closed(
        {"head": {"enum": [1, 2]}, "tail": {"$ref": "#/$defs/list"}}, ["head", "tail"])]}},
     "$ref": "#/$defs/list"},
    {"anyOf": [POINT, {"type": "boolean"}, {"type": "string", "pattern": PATTERNS[0]}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]},
]  # fmt: skip


@dataclass
class Maker:
    rng: random.Random
    names: tuple[str, ...] = ()  # of $defs that may be mentioned

    def leaf(self) -> Schema:
        rng = self.rng
        low = rng.randrange(-2000, 2000)
        least = rng.randrange(4)
        return rng.choice(
            [
                {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 7, 300])},
                {"type": "number", "minimum": low, "maximum": low + 5},
                {"type": "string", "minLength": least, "maxLength": least + rng.randrange(9)},
                {"type": "string", "pattern": rng.choice(PATTERNS)},
                {"enum": rng.sample(["a", "bc", "d e", 1, 2.5, None, True], rng.randrange(1, 5))},
                {"type": "boolean"},
                {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
                {"const": rng.choice(["x", 0, False, None, ["k"]])},
            ]
        )

    def schema(self, depth: int) -> Schema:
        rng = self.rng
        kind = rng.choice(["object", "object", "array", "anyOf", "ref", "leaf"])
        if kind == "ref" and self.names:
            return {"$ref": f"#/$defs/{rng.choice(self.names)}"}
        if depth == 0 or kind in ("leaf", "ref"):
            return self.leaf()
        if kind == "array":
            least = rng.randrange(3)
            return {
                "type": "array",
                "items": self.schema(depth - 1),
                "minItems": least,
                "maxItems": least + rng.randrange(3),
            }
        if kind == "anyOf":
            return {"anyOf": [self.schema(depth - 1) for _ in range(rng.randrange(2, 4))]}
        names = rng.sample(
            ["id", "name", "size", "tags", "is ok", "größe", "next"], rng.choice([1, 2, 3])
        )
        return closed(
            {name: self.schema(depth - 1) for name in names},
            [name for name in names if rng.random() < 0.6],
        )

    def whole(self) -> Schema:
        names = tuple(f"part{i}" for i in range(self.rng.randrange(3)))
        parts = {name: self.schema(1) for name in names}
        self.names = names
        root = self.schema(self.rng.choice([1, 2, 3]))
        return {**root, "$defs": parts} if parts else root


def grammar_of(schema: Schema) -> str:
    """As the router makes it of `guided_json`."""
    part = schema_part(schema, "guided_json", Bounds(512, 9 * 10**18))
    return composed([("form", part)], ["body: @form"])


@functools.cache
def accepted() -> tuple[tuple[Schema, str], ...]:
    """(schema, grammar) of all that llguidance takes."""
    made = [Maker(random.Random(seed)).whole() for seed in range(NUM_GENERATED)]
    for schema in (*WRITTEN, *made):
        Draft202012Validator.check_schema(schema)
    both = [(schema, grammar_of(schema)) for schema in (*WRITTEN, *made)]
    taken = [each for each in both if not LLMatcher(ll_tokenizer(), each[1]).is_error()]
    assert len(taken) > 0.9 * len(both)
    return tuple(taken)


def check(schema: Schema, grammar: str, answer: Answer) -> None:
    """What ended by itself is valid; what was cut is the beginning of something valid."""
    assert answer.error is None
    assert answer.num_finals == 1
    matcher = LLMatcher(ll_tokenizer(), grammar)
    assert matcher.consume_tokens(answer.tokens), (schema, answer.tokens)
    if answer.finish_reason is FinishReason.STOP:
        text = tokenizer().decode(answer.tokens, skip_special_tokens=True)
        Draft202012Validator(schema).validate(json.loads(text))
    else:
        assert answer.finish_reason is FinishReason.LENGTH
        assert len(answer.tokens) == MAX_TOKENS


def answers_of(
    asked: tuple[tuple[Schema, str], ...], device: str = "cpu", path: str = "", **changes: object
) -> list[Answer]:
    """One decode worker in float32, as many at a time as it takes; path: else a shallow model."""
    prompt = chat_ids("How many apples are left? Answer as JSON.")
    config = sections("never", device=device, num_pages=3000, max_num_reqs=BATCH)
    config["model"] = {"path": path or str(shallow()), "dtype": "float32"}
    answers = []
    with running(config, num_prefill=0) as cluster:
        for first in range(0, len(asked), 2 * BATCH):
            wanted = [
                Sampling(MAX_TOKENS, seed=first + i, grammar=grammar, **changes)
                for i, (_, grammar) in enumerate(asked[first : first + 2 * BATCH])
            ]
            answers += cluster.client.generate([prompt] * len(wanted), wanted)
    return answers


def test_every_output_parses_and_validates() -> None:
    asked = accepted() if pairwise.whole else accepted()[::2]
    answers = answers_of(asked)
    for (schema, grammar), answer in zip(asked, answers, strict=True):
        check(schema, grammar, answer)
    finished = sum(answer.finish_reason is FinishReason.STOP for answer in answers)
    print(f"{finished} of {len(answers)} finished, {sum(len(a.tokens) for a in answers)} tokens")
    assert finished > 0.8 * len(answers)
    assert len({tuple(answer.tokens) for answer in answers}) > len(answers) // 2


def test_penalties_filters_and_min_tokens_break_no_structure() -> None:
    asked = accepted()[::4]
    answers = answers_of(
        asked, top_p=0.9, top_k=20, presence_penalty=1.5, frequency_penalty=1.0,
        repetition_penalty=1.5, min_tokens=30, logit_bias=((EOS, 80.0), (5, -100.0), (40, 20.0)),
    )  # fmt: skip
    for (schema, grammar), answer in zip(asked, answers, strict=True):
        check(schema, grammar, answer)


def free(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return torch.ones(len(mask), vocab_size, dtype=torch.bool)


def shifted(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return UNPACK(mask, vocab_size).roll(1, 1)


UNPACK = changes.unpack


@pytest.mark.parametrize("unpack", [free, shifted])
def test_the_same_check_fails_without_the_right_masks(unpack: object) -> None:
    asked = accepted()[:40]
    with mock.patch.object(changes, "unpack", unpack):
        answers = answers_of(asked)
    failed = sum(answer.error is not None for answer in answers)
    assert failed > len(asked) // 2
