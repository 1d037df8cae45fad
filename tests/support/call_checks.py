"""What must hold of every form of calls, over the templates of `call_forms`.

    python -m tests.support.call_checks

prints a row for each template: its form is recognised by what it writes, its calls are read whole
and in pieces, a grammar of the form takes them, and what it forces comes back as calls.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import llguidance.numpy as bitmask
from llguidance import LLMatcher, LLTokenizer

from router.openai.tools import Function, Tools, answer_rules, can_be_free
from router.text.bounded import Bounds
from router.text.forms.form import MARK, Form, Pairs
from router.text.forms.free import Around
from router.text.forms.parser import FormParser
from router.text.forms.recognise import Found, recognised
from router.text.forms.rules import Called, rules_of
from router.text.grammar import Spelling, composed
from router.text.parsers import Parsed, Parser
from router.text.template import ChatTemplate
from tests.support.call_forms import CASES, FORCED, FUNCTIONS, NAMES, PARAMETERS, Case, rendered
from tests.support.prompts import TINY, accepts, written
from worker.config.checkpoint.grammar_tokens import grammar_tokenizer
from worker.config.checkpoint.tokens import TokenizerFile


@cache
def found(case: Case) -> Found:
    """What is recognised by the template."""
    template = ChatTemplate(case.template(), {})
    return recognised(template.probe, template.source)


def taken(parser: Parser, text: str, seed: int | None = None) -> Parsed:
    """What a parser makes of a text, whole or in pieces of 1 to 7 characters."""
    parsed, rng = Parsed(), random.Random(seed)
    while text:
        size = len(text) if seed is None else rng.randint(1, 7)
        parsed += parser.feed(text[:size])
        text = text[size:]
    parsed += parser.finish()
    return parsed


def calls_of(parsed: Parsed) -> list[tuple[str, Any]]:
    """Names and arguments."""
    return [(part.name, json.loads(part.arguments)) for part in parsed.calls]


@cache
def tokenizer(words: tuple[str, ...], *, special: bool = False) -> tuple[LLTokenizer, Spelling]:
    """The bundled model's with these added tokens, and how texts are spelled with it."""
    described = json.loads((TINY / "tokenizer.json").read_text())
    size = max(*described["model"]["vocab"].values(), *(t["id"] for t in described["added_tokens"]))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ids = {word: size + 1 + i for i, word in enumerate(words)}
    described["added_tokens"] += [
        {"id": i, "content": word, "special": special, **flags} for word, i in ids.items()
    ]
    file = TokenizerFile(TINY, json.dumps(described), described)
    return grammar_tokenizer(file, size + 1 + len(words)), Spelling(ids if special else {})


def marks_of(form: Form) -> tuple[str, ...]:
    """Those that a checkpoint may have as tokens."""
    return tuple(dict.fromkeys(mark for text in form.texts() for mark in MARK.findall(text)))


def grammar_of(form: Form, parameters: Any, spelling: Spelling, num_calls: int = 2) -> str:
    """A grammar that demands calls."""
    functions = [Called(name, parameters) for name in NAMES]
    made = rules_of(form, functions, num_calls, spelling, Bounds(4096, 10**6, num_calls))
    return composed(made.parts, [*made.rules, "body: calls"])


def free_grammar_of(
    form: Form, parameters: Any, spelling: Spelling, *, several: bool = True
) -> str:
    """A grammar that lets an answer call."""
    # Forms that quote strings by marks keep to no nested schema, so strict functions are refused.
    strict = not (isinstance(form.style, Pairs) and form.style.quote)
    functions = tuple(Function(name=name, parameters=parameters, strict=strict) for name in NAMES)
    tools, bounds = Tools([], functions, parallel=several), Bounds(4096, 10**6, 2)
    made = answer_rules(form, tools, spelling, bounds, Around())
    return composed(made.parts, [*made.rules, "body: answer"])


def forced(
    made: LLTokenizer,
    grammar: str,
    seed: int,
    most: int = 2000,
    closes_at: int = 2000,
    begun: str = "",
) -> str:
    """A text by a grammar, of tokens that are drawn from those allowed, until it ends.

    After `closes_at` tokens what closes a string, a list or an object is drawn where it may be.
    begun: how it begins.
    """
    closing = {made.tokenize_str(mark)[0] for mark in ('"', "]", "}")}
    matcher, rng = LLMatcher(made, grammar, log_level=0), random.Random(seed)
    tokens = written(made, begun)
    assert matcher.try_consume_tokens(tokens) == len(tokens), begun
    mask = bitmask.allocate_token_bitmask(1, made.vocab_size)
    while not matcher.is_stopped():
        bitmask.fill_next_token_bitmask(matcher, mask)
        words = enumerate(mask[0].view("uint32").tolist())
        allowed = [32 * i + bit for i, word in words for bit in range(32) if word >> bit & 1]
        assert allowed, matcher.get_error()
        if len(tokens) >= closes_at:
            allowed = [token for token in allowed if token in closing] or allowed
        token = rng.choice(allowed)
        if token == made.eos_token:
            break
        assert matcher.try_consume_tokens([token]) == 1, f"{token} is allowed and refused"
        tokens.append(token)
        assert len(tokens) < most, "it does not end"
    return b"".join(map(made.decode_bytes, ([token] for token in tokens))).decode()


def wandered(made: LLTokenizer, grammar: str, signs: Sequence[str], seed: int) -> tuple[str, bool]:
    """A text of `signs`, as far as a grammar takes them, and whether it may end there.

    Where a grammar leaves few tokens, one of these comes, too.
    """
    matcher, rng, tokens = LLMatcher(made, grammar, log_level=0), random.Random(seed), list[int]()
    mask = bitmask.allocate_token_bitmask(1, made.vocab_size)
    for _ in range(40):
        if matcher.is_stopped():
            break
        more = made.tokenize_str(rng.choice(signs))
        bitmask.fill_next_token_bitmask(matcher, mask)
        words = mask[0].view("uint32").tolist()
        if sum(word.bit_count() for word in words) < 40 and rng.random() < 0.7:
            more = [i for i in range(made.vocab_size) if words[i // 32] >> i % 32 & 1]
            more = [one for one in rng.sample(more, min(1, len(more))) if one != made.eos_token]
        tokens += more[: matcher.try_consume_tokens(more)]
    text = b"".join(made.decode_bytes([token]) for token in tokens).decode(errors="ignore")
    return text, matcher.is_accepting()


SIZE = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}


def wander(case: Case, num: int) -> int:
    """Assert that whatever a free grammar takes, its calls are as wanted; how many there were."""
    form, seen = found(case).form, 0
    right, wrong = (
        rendered(case, compact=True, called=[("note", {"size": size})]) for size in (1, "x")
    )
    bare = [wrong.partition(mark)[2] for mark in form.lead[:1]]
    signs = [*form.lead, *form.marks, *form.skips, "Hi. ", *' \n{}[]"', *[right, wrong, *bare] * 3]
    for words in ((), marks_of(form)):
        made, spelling = tokenizer(words)
        grammar = free_grammar_of(form, SIZE, spelling)
        for seed in range(num):
            text, ends = wandered(made, grammar, signs, seed)
            parsed = taken(FormParser(form, dict.fromkeys(NAMES, SIZE)), text)
            calls = parsed.calls if ends else parsed.calls[:-1]
            for call in calls:
                size = json.loads(call.arguments).pop("size")
                assert (call.name in NAMES, type(size)) == (True, int), text
            seen += len(calls)
    return seen


def _whole(case: Case) -> None:
    parsed = taken(FormParser(found(case).form, FUNCTIONS), rendered(case))
    assert calls_of(parsed) == case.called
    assert not parsed.content.strip()


def _pieces(case: Case) -> None:
    form = found(case).form
    texts = [rendered(case)]
    if not form.bare:
        ends = "\nDone <b>." if form.last or form.tail else ""
        texts.append(f"I look {{ <x>.\n{texts[0]}{ends}")
    for text in texts:
        whole = taken(FormParser(form, FUNCTIONS), text)
        for seed in range(4):
            parsed = taken(FormParser(form, FUNCTIONS), text, seed)
            assert calls_of(parsed) == case.called
            assert parsed.content == whole.content
    assert form.bare or whole.content.startswith("I look { <x>.")


def _forced(case: Case) -> None:
    form, text = found(case).form, rendered(case, compact=True)
    for words, special in (((), False), (marks_of(form), False), (marks_of(form), True)):
        made, spelling = tokenizer(words, special=special)
        grammar = grammar_of(form, PARAMETERS, spelling)
        assert accepts(made, grammar, text.lstrip("\n")), f"{words} {special} {text}"
        grammar = grammar_of(form, FORCED, spelling)
        for seed in range(2):
            assert not _kept(form, forced(made, grammar, seed), seed).content.strip()


def _kept(form: Form, said: str, seed: int) -> Parsed:
    """What is made of a text whose calls must be as FORCED wants them."""
    parsed = taken(FormParser(form, dict.fromkeys(NAMES, FORCED)), said, seed)
    for _, given in calls_of(parsed):
        assert given["unit"] in ("mm", "<inch>"), said
        assert isinstance(given["lines"], str), said
        assert set(given) <= set(FORCED["properties"]), said
        assert isinstance(given.get("size", 0), int), said
    return parsed


def _free(case: Case) -> None:
    form, call = found(case).form, rendered(case, compact=True).strip("\n")
    if not can_be_free(form, begun=False):
        return
    wrong, text = call.replace("-3", "x"), "Hello {a} <b> [1] functools, Action: there"
    good, bad = ["", text, call], [wrong]
    if not form.bare:
        good += [f"I look.\n{call}", f"{call}\nand {call}. {text}"]
        bad += [f"I look.\n{wrong}", f"{call}\nand {wrong}"]
    begun = "I look.\n" + call[: call.index(NAMES[0])]
    if form.bare:
        begun = form.first + form.opens + NAMES[0] + form.named
    for words in ((), marks_of(form)):
        made, spelling = tokenizer(words)
        grammar = free_grammar_of(form, PARAMETERS, spelling)
        assert [said for said in good if not accepts(made, grammar, said)] == []
        assert [said for said in bad if accepts(made, grammar, said)] == []
        grammar = free_grammar_of(form, FORCED, spelling, several=False)
        said = forced(made, grammar, 0, begun=begun)
        assert _kept(form, said, 0).calls, said


def _is_found(case: Case) -> None:
    assert (found(case).form.name, found(case).by) == (case.name, case.by)


CHECKS: Mapping[str, Callable[[Case], None]] = {
    "recognised": _is_found, "whole": _whole, "pieces": _pieces, "forced": _forced, "free": _free,
}  # fmt: skip


def outcomes() -> Iterator[tuple[Case, dict[str, bool]]]:
    """Of each case, which checks hold."""
    for case in CASES:
        held = dict[str, bool]()
        for name, check in CHECKS.items():
            try:
                check(case)
            except AssertionError:
                held[name] = False
            else:
                held[name] = True
        yield case, held


def main() -> None:
    """Print the table."""
    print("| form |", " | ".join(CHECKS), "|")
    print("|---|" + "---|" * len(CHECKS))
    for case, held in outcomes():
        print(f"| {case.name} |", " | ".join("✓" if held[name] else "✗" for name in CHECKS), "|")


if __name__ == "__main__":
    main()
