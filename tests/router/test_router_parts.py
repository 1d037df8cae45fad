"""An answer has the same parts in the same order, however it is asked for, sent and cut off.

Texts are put together from their parts, so that what is right is known without a parser.
"""

import importlib.util
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from pydantic_core import from_json

from router.adapters.message_body import MessageAnswer
from router.adapters.response_body import Asked, ResponseAnswer
from router.adapters.store import ResponseStore
from router.dispatch.mailbox import Delta
from router.dispatch.queue import Req
from router.openai.body import AnswerForm, Body, Prepared, merged
from router.openai.chat import ChatWriter
from router.openai.completions import TextWriter
from router.text.forms.known import FORMS
from router.text.forms.parser import FormParser
from router.text.output import Ends
from router.text.parsers import Plain
from router.text.reasoning import Reasoning
from router.text.tokenizer import Text
from tests.equivalence.test_hybrid_mutants import mutate
from tests.fault.router_doubles import make_model
from tests.support import pairwise
from worker.api import FinishReason, Sampling, TokenLogprob

MARK = "<tool_call>"
ARGUMENTS = ('{"city": "é\u2028<b>"}', "{}", '{"a": [1, {"b": "}"}], "c": -1.5}')
WIDTHS = (1, 2, 5, 16, 64)  # tokens a step: those of this vocabulary are short
Part = tuple[str, str, str]  # kind, a call's name, text or arguments


class Piece(NamedTuple):
    """A part as a model writes it."""

    part: Part
    raw: str
    start: int = 0  # of its own text in `raw`


THOUGHT = Piece(("reasoning", "", "why < so"), "<think>\nwhy < so\n</think>\n\n", 8)


def call(arguments: str) -> Piece:
    head = f'{MARK}\n{{"name": "look", "arguments": '
    return Piece(("call", "look", arguments), f"{head}{arguments}}}\n</tool_call>", len(head))


def said(text: str) -> Piece:
    return Piece(("text", "", text.strip()), text, len(text) - len(text.lstrip()))


def forced() -> list[list[Piece]]:
    """0 to 3 calls, with a thought or none before them, and a text before, between and behind."""
    found: list[list[Piece]] = []
    for num in range(4):
        for thinks, *says in itertools.product((False, True), repeat=num + 2):
            pieces = [THOUGHT] * thinks
            for i, has_text in enumerate(says):
                text = f"\nSay é{i} < that.\n" if i else "Say < that.\n"
                pieces += [said(text)] * has_text
                pieces += [call(each) for each in ARGUMENTS[i:num][:1]]
            if len(pieces) > thinks:
                found.append(pieces)
    return found


class Cut(NamedTuple):
    """Where an answer ends, and what ends it."""

    end: int
    stop: str = ""  # empty: a limit of tokens, or nothing at the end of all


def expected(pieces: Sequence[Piece], cut: Cut | None) -> tuple[list[Part], str]:
    """The parts of an answer, and why it has ended."""
    parts, at, is_whole = list[Part](), 0, True
    for piece in pieces:
        num = (len(piece.raw) if cut is None else cut.end - at) - piece.start
        at += len(piece.raw)
        text = piece.part[2][: max(num, 0)]
        if piece.part[0] != "call" and cut is not None and not cut.stop and num == len(text):
            text = text.removesuffix("<")  # of which nobody knows what it begins
        if piece.part[0] == "call" and text:
            is_whole = text == piece.part[2]
        if text.strip():
            parts.append((piece.part[0], piece.part[1], text.strip()))
    called = any(kind == "call" for kind, _, _ in parts)
    if cut is not None and not cut.stop:
        return parts, "length"
    return parts, "tool_calls" if called and is_whole else "stop"


class Bench:
    """Makes answers of given tokens as routers do, without one."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def deltas(self, tokens: Sequence[int], cut: Cut | None, step: int, *, scored: bool = False):
        stops = (cut.stop,) if cut is not None and cut.stop else ()
        output = self.text.output((), Ends(stops, places=scored), frozenset())
        why = FinishReason.LENGTH if cut is not None and not cut.stop else FinishReason.STOP
        for i in range(0, len(tokens), step):
            some = tokens[i : i + step]
            piece = output.feed(some)
            told = [(token, TokenLogprob(-1.0, ())) for token in some[: piece.num_tokens]]
            more = {"scored": tuple(told), "starts": piece.starts} if scored else {}
            if piece.stopped:
                yield Delta(0, piece.text, why, stopped_by=output.stopped_by, **more)
                return
            if piece.text or scored:
                yield Delta(0, piece.text, **more)
        yield Delta(0, output.finish(), why, stopped_by=output.stopped_by)

    def form(self, kind: str, stop: str = "", *, scored: bool = False) -> AnswerForm:
        def parser() -> Reasoning:
            return Reasoning(FormParser(FORMS["hermes"], {"look": {}}), inside=False)

        writer = ChatWriter(parser, self.text.token_bytes if scored else None)
        req = Req(0, (1,), Sampling(max_tokens=99), SimpleNamespace(stopped_by=stop))
        prepared = Prepared(writer, "m", [req], streamed=False)
        if kind == "chat":
            return Body(prepared, "x", [req])
        if kind == "messages":
            return MessageAnswer(req.sampling.max_tokens, prepared, "x", [req])
        head = {"background": False, "object": "response", "model": "m"}
        head |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        asked = Asked(head, "", "tag", (), ResponseStore(0, 0, 1), {}, None, keeps=False)
        return ResponseAnswer(asked, prepared, "x", [req])


KINDS: dict[str, Callable[[Any, bool], tuple[list[Part], str]]] = {}


def reads(function: Callable[[Any, bool], tuple[list[Part], str]]) -> Any:
    KINDS[function.__name__] = function
    return function


def joined(parts: Iterator[Part]) -> list[Part]:
    """With what belongs together in one; a call begins with its name."""
    found = list[Part]()
    for kind, name, text in parts:
        if found and found[-1][0] == kind and not name:
            found[-1] = (kind, found[-1][1], found[-1][2] + text)
        else:
            found.append((kind, name, text))
    return [(kind, name, text.strip()) for kind, name, text in found]


def of_chat(message: Any) -> Iterator[Part]:
    if message.get("reasoning"):
        yield "reasoning", "", message["reasoning"]
    if message.get("content"):
        yield "text", "", message["content"]
    for one in message.get("tool_calls") or ():
        yield "call", one["function"].get("name") or "", one["function"]["arguments"]


@reads
def chat(answer: Any, streamed: bool) -> tuple[list[Part], str]:
    if not streamed:
        choice = answer["choices"][0]
        return joined(of_chat(choice["message"])), choice["finish_reason"]
    choices = [one for event in answer for one in event["choices"]]
    assert all(len(list(of_chat(choice["delta"]))) <= 1 for choice in choices)
    parts = joined(part for choice in choices for part in of_chat(choice["delta"]))
    return parts, choices[-1]["finish_reason"]


@reads
def messages(answer: Any, streamed: bool) -> tuple[list[Part], str]:
    names = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    names["stop_sequence"] = "stop"
    fields = {"text": "text", "thinking": "thinking", "input_json": "partial_json"}
    if not streamed:
        parts = [
            ("call", block["name"], block["input"]) if block["type"] == "tool_use"
            else ("text" if block["type"] == "text" else "reasoning", "", block[block["type"]])
            for block in answer["content"]
        ]  # fmt: skip
        return parts, names[answer["stop_reason"]]
    blocks: dict[int, list[Any]] = {}
    last = answer[-2]["delta"]
    assert not (last["stop_sequence"] and last["stop_reason"] != "stop_sequence")
    for event in answer:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            kind = {"tool_use": "call", "thinking": "reasoning"}.get(block["type"], "text")
            blocks[event["index"]] = [kind, block.get("name", ""), ""]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]][2] += delta[fields[delta["type"].removesuffix("_delta")]]
    return [tuple(block) for _, block in sorted(blocks.items())], names[last["stop_reason"]]


@reads
def responses(answer: Any, streamed: bool) -> tuple[list[Part], str]:
    if streamed:
        done = [e["item"] for e in answer if e["type"] == "response.output_item.done"]
        answer = answer[-1]["response"]
        assert done == answer["output"]
    parts = [
        ("call", item["name"], item["arguments"]) if item["type"] == "function_call"
        else ("text" if item["type"] == "message" else "reasoning", "", item["content"][0]["text"])
        for item in answer["output"]
    ]  # fmt: skip
    statuses = [item["status"] for item in answer["output"] if item["type"] != "reasoning"]
    assert "incomplete" not in statuses[:-1] + statuses * (answer["status"] == "completed")
    if answer["status"] == "incomplete":
        return parts, "length" if answer["incomplete_details"] else "stop"
    called = any(part[0] == "call" for part in parts)
    return parts, "tool_calls" if called else "stop"


def events_of(raw: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in raw.decode().splitlines()]
    assert all(line[:1] in ("{", "[", "") or line.startswith("event: ") for line in lines)
    return [json.loads(line) for line in lines if line.startswith("{")]


def sent(bench: Bench, kind: str, deltas: Sequence[Delta], streamed: bool, **how: Any) -> bytes:
    form = bench.form(kind, deltas[-1].stopped_by, **how)
    if streamed:
        return b"".join(form.events([delta]) for delta in deltas) + form.end()
    return form.whole(merged(deltas))


def as_told(parts: Sequence[Part], kind: str, streamed: bool) -> list[Any]:
    """The expected parts as an endpoint can tell them."""
    if kind == "messages" and not streamed:
        return [(k, n, partly(t) if k == "call" else t) for k, n, t in parts]
    if kind == "chat" and not streamed:
        texts = {k: [t for kind, _, t in parts if kind == k] for k in ("reasoning", "text")}
        told = [(k, "", "\n".join(t)) for k, t in texts.items() if t]
        return [*told, *(part for part in parts if part[0] == "call")]
    return list(parts)


def partly(text: str) -> Any:
    return from_json(text, allow_partial=True)


def check(bench: Bench, pieces: Sequence[Piece], cut: Cut | None, kinds: Sequence[Any]) -> None:
    raw = "".join(piece.raw for piece in pieces)
    end = len(raw) if cut is None or cut.stop else cut.end
    tokens = bench.text.encode(raw[:end], add_special_tokens=False)
    parts, reason = expected(pieces, cut)
    for kind, streamed, step in kinds:
        deltas = list(bench.deltas(tokens, cut, step))
        body = sent(bench, kind, deltas, streamed)
        answer = events_of(body) if streamed else json.loads(body)
        found, why = KINDS[kind](answer, streamed)
        shown = [(k, n, t.strip() if isinstance(t, str) else t) for k, n, t in found]
        told = [part for part in shown if part != ("text", "", "")]
        where = f"{raw[:end]!r} {cut} {kind} streamed={streamed} step={step}"
        assert told == as_told(parts, kind, streamed), where
        assert why == reason, where


WAYS = list(itertools.product(("chat", "messages", "responses"), (False, True), WIDTHS))


def cuts(raw: str) -> Iterator[Cut]:
    """At every position: by a limit of tokens, and by a stop string of one to four characters."""
    for at in range(1, len(raw)):
        yield Cut(at)
        stop = raw[at : at + 1 + at % 4]
        yield Cut(raw.find(stop), stop)


def law(bench: Bench, num: int | None) -> None:
    """num: of cases at random; None: all. Of a case some ways: neighbours have the others."""
    cases, odd = [(pieces, None) for pieces in forced()], []
    for pieces in forced():
        raw = "".join(piece.raw for piece in pieces)
        cases += [(pieces, cut) for cut in cuts(raw)]
        odd += [(pieces, cut) for cut in cuts(raw) if raw[cut.end - 2 : cut.end] == " <"]
    rng = random.Random(4)
    some = [*cases[:60:5], *rng.sample(odd, 30), *rng.sample(cases, num or 0)]
    for pieces, cut in cases if num is None else some:
        check(bench, pieces, cut, rng.sample(WAYS, 3 if num is None else 6))


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """With a vocabulary of letters, or with one where the texts given are tokens, too."""
    words = getattr(request, "param", ())
    return Bench(Text(make_model(tmp_path_factory.mktemp("model"), words=words)))


@pytest.mark.parametrize("bench", [(), (MARK, "</tool_call>")], indirect=True, ids=len)
def test_parts_and_their_order_are_the_same(bench: Bench) -> None:
    law(bench, None if pairwise.whole else 100)


MUTANTS = {
    "text before calls": (
        "adapters.blocks:Blocks.feed", "self._writer.parsed(piece).parts",
        "sorted(self._writer.parsed(piece).parts, key=lambda part: hasattr(part, 'index'))",
    ),
    "texts of an answer are one": (
        "text.parsers:Parsed.__iadd__", "last = self.parts[-1] if self.parts else None",
        "last = next((p for p in self.parts if type(p) is TextPart), None) or "
        "(self.parts[-1] if self.parts else None)",
    ),
    "a cut call is whole": (
        "openai.chat:ChatWriter.reason", "self._called.get(delta.index)",
        "delta.index in self._called",
    ),
    "a whole call is cut": (
        "adapters.blocks:Blocks._call", "self.all[-1].is_cut = False", "pass",
    ),
    "a stop string cuts nothing": (
        "openai.chat:ChatWriter.parsed", "delta.stopped_by or is_limit", "is_limit",
    ),
    "a stop string takes text with it": ("text.parsers:kept", "if cut is True:", "if cut:"),
    "a limit leaves markup": ("text.parsers:kept", "if not cut:", "if not cut or cut is True:"),
    "a call ends by a stop sequence": (
        "adapters.message_body:MessageAnswer._ended", 'if reason == "end_turn" else ""', "",
    ),
    "arguments that were cut are none": (
        "adapters.message_body:_object", "allow_partial=True", "allow_partial=False",
    ),
    "lines end within events": ("openai.body:event_json", "if not data.isascii():", "if False:"),
    "chunks of two parts": (
        "openai.chat:ChatWriter.chunks", "_told(part) for part in self.parsed(delta).parts",
        "DeltaMessage(content=p.content or UNSET, reasoning=p.reasoning or UNSET, tool_calls="
        "[_tool_call(c) for c in p.calls] or UNSET) for p in [self.parsed(delta)] if p.parts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", pairwise.one_in(4, MUTANTS))
def test_a_mutant_is_red(name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    where, *change = MUTANTS[name]
    mutate(monkeypatch, f"router.{where}", *change)
    with pytest.raises(AssertionError):
        law(bench, 100)


def by_client(make: Any, body: bytes, streamed: bool, web: Any = httpx) -> Any:
    """A vendor's client that gets this answer, whatever it asks."""
    kind = "text/event-stream" if streamed else "application/json"
    answer = web.MockTransport(
        lambda _: web.Response(200, content=body, headers={"content-type": kind})
    )
    http = web.Client(transport=answer)
    return make(api_key="x", base_url="http://x/v1", http_client=http, max_retries=0)


def chat_by_client(body: bytes, streamed: bool) -> Any:
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    completions = by_client(openai.OpenAI, body, streamed).chat.completions
    if streamed:
        with completions.stream(**asked) as stream:
            list(stream)
            made = stream.current_completion_snapshot
    else:
        made = completions.create(**asked)
    return [
        (one.message.content or "", one.finish_reason, getattr(one.message, "reasoning", None), [
            (call.function.name, call.function.arguments) for call in one.message.tool_calls or ()
        ])
        for one in made.choices
    ]  # fmt: skip


def response_by_client(body: bytes, streamed: bool) -> Any:
    responses = by_client(openai.OpenAI, body, streamed).responses
    if streamed:
        with responses.stream(model="m", input="x") as stream:
            events = list(stream)
        made = events[-1].response
        for event in events:  # what the client has added up itself
            if event.type in (
                "response.output_text.delta",
                "response.function_call_arguments.delta",
            ):
                item = made.output[event.output_index]
                text = item.content[0].text if item.type == "message" else item.arguments
                assert text.startswith(event.snapshot)
                assert event.snapshot.endswith(event.delta)
    else:
        made = responses.create(model="m", input="x")
    return made.status, [
        item.model_dump(exclude={"call_id"}, exclude_none=True) for item in made.output
    ]


def message_by_client(body: bytes, streamed: bool) -> Any:
    anthropic = importlib.import_module("anthropic")
    web = getattr(importlib.import_module("anthropic._client"), "httpx2", httpx)  # as its version
    messages = by_client(anthropic.Anthropic, body, streamed, web).messages
    asked: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    if streamed:
        with messages.stream(**asked) as stream:
            made = stream.get_final_message()
    else:
        made = messages.create(**asked)
    return made.stop_reason, [block.model_dump(exclude={"id"}) for block in made.content]


CLIENTS = {"chat": chat_by_client, "responses": response_by_client, "messages": message_by_client}


@pytest.mark.parametrize("kind", CLIENTS)
def test_what_the_vendors_clients_add_up_is_the_whole_answer(kind: str, bench: Bench) -> None:
    if kind == "messages" and importlib.util.find_spec("anthropic") is None:
        pytest.skip("anthropic is not installed")
    rng, texts = random.Random(2), forced()
    for _ in range(400 if pairwise.whole else 16):
        raw = "".join(piece.raw for piece in rng.choice(texts))
        cut = rng.choice([None, *cuts(raw)])
        end = len(raw) if cut is None or cut.stop else cut.end
        tokens = bench.text.encode(raw[:end], add_special_tokens=False)
        made = []
        for streamed in (False, True):
            deltas = list(bench.deltas(tokens, cut, rng.choice(WIDTHS)))
            made.append(CLIENTS[kind](sent(bench, kind, deltas, streamed), streamed))
        assert made[0] == made[1], f"{raw[:end]!r} {cut}"


def test_choices_begin_in_order_whichever_speaks_first(bench: Bench) -> None:
    """OpenAI's own client fails where one comes before one of a lower index."""
    reqs = [Req(i, (1,), Sampling(max_tokens=9), SimpleNamespace(stopped_by="")) for i in range(8)]
    for seed in range(5):
        order = random.Random(seed).sample(range(8), 8)
        writer = ChatWriter(Plain, None)
        form = Body(Prepared(writer, "m", reqs, streamed=True, num_samples=8), "x", reqs)
        body = b"".join(form.events([Delta(i, f"I am {i}.")]) for i in order)
        body += form.events([Delta(i, "", FinishReason.STOP) for i in order]) + form.end()
        opened = [event["choices"][0]["index"] for event in events_of(body)[:8]]
        assert opened == list(range(8))
        texts = [text for text, *_ in chat_by_client(body, True)]
        assert texts == [f"I am {i}." for i in range(8)]


def tokens_of(answer: Any, streamed: bool) -> Iterator[tuple[str, bytes]]:
    """Of a response: its texts, and the bytes of the tokens that are scored beside them."""
    if streamed:
        for event in answer:
            if event["type"] == "response.output_text.done":
                deltas = [
                    one for each in answer if each["type"] == "response.output_text.delta"
                    and each["output_index"] == event["output_index"] for one in each["logprobs"]
                ]  # fmt: skip
                assert deltas == event["logprobs"]
        answer = answer[-1]["response"]
    for item in answer["output"]:
        if item["type"] == "message":
            part = item["content"][0]
            yield part["text"], b"".join(bytes(one["bytes"]) for one in part["logprobs"])


def test_logprobs_of_a_text_are_those_of_its_tokens(bench: Bench) -> None:
    rng, texts = random.Random(3), forced()
    for pieces in texts if pairwise.whole else rng.sample(texts, 12):
        raw = "".join(piece.raw for piece in pieces)
        tokens = bench.text.encode(raw, add_special_tokens=False)
        for cut, streamed, step in [(None, False, 99), *(
            (rng.choice([None, *cuts(raw)]), streamed, rng.choice(WIDTHS))
            for streamed in (False, True, True)
        )]:  # fmt: skip
            end = len(tokens) if cut is None or cut.stop else rng.randrange(1, len(tokens))
            deltas = list(bench.deltas(tokens[:end], cut, step, scored=True))
            body = sent(bench, "responses", deltas, streamed, scored=True)
            answer = events_of(body) if streamed else json.loads(body)
            for said, scored in tokens_of(answer, streamed):
                shown = scored.decode("utf-8", "ignore").strip()
                if cut is None:
                    assert shown == said.strip()
                assert shown.startswith(said.strip()) or said.strip().startswith(shown)
                assert said.strip() == "" or shown, (raw, cut)


def test_an_offset_is_an_index_into_the_text(bench: Bench) -> None:
    """Characters of several tokens and halves of them, echoes, stop strings at every position."""
    raw, prompt = "é😀b the é\u2028c quick é", "say é: "
    tokens = bench.text.encode(raw, add_special_tokens=False)
    asked = bench.text.encode(prompt, add_special_tokens=False)
    scores = tuple((token, TokenLogprob(-1.0, ())) for token in asked[1:])
    for at, echo, step in itertools.product([None, *range(len(raw))], ("", prompt), (1, 3, 16)):
        cut = None if at is None else Cut(raw.find(raw[at : at + 3]), raw[at : at + 3])
        deltas = list(bench.deltas(tokens, cut, step, scored=True))
        deltas[0].prompt = scores if echo else ()
        told = list[Any]()
        for streamed in (False, True):
            prompts = (asked,) if echo else ()
            writer = TextWriter((echo,) if echo else (), bench.text.token_bytes, prompts, 0)
            if streamed:
                choices = [writer.opening(deltas[0])] if echo else []
                choices += [one for delta in deltas for one in writer.chunks(delta)]
            else:
                choices = [writer.whole(0, merged(deltas)[0])]
            text = "".join(one.text for one in choices)
            marks = [one.logprobs for one in choices if one.logprobs]
            names = [token for each in marks for token in each.tokens]
            offsets = [offset for each in marks for offset in each.text_offset]
            assert text == echo + (raw if cut is None else raw[: cut.end])
            assert len(names) == len(offsets)
            assert offsets == sorted(offsets)
            for name, offset in zip(names, offsets, strict=True):
                assert offset <= len(text)
                whole = cut is None or offset + len(name) <= len(text)
                assert not whole or "\ufffd" in name or text.startswith(name, offset)
            told.append((text, names, offsets))
        assert told[0] == told[1]
