"""What a request brings can end that request, and nothing else: not its worker, not its router.

A real router and a real decode worker in this process. A worker whose engine thread raises ends its
process, so that here the whole test would end.
"""

import functools
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import httpx
import pytest
from llguidance import LLMatcher, LLParserLimits
from llguidance.numpy import fill_next_token_bitmask

from tests.fault.router_doubles import HANG_S, routed
from tests.support.engines import Running, running
from tests.support.prompts import TINY
from tests.support.shallow import shallow

PROBLEM = {"messages": [{"role": "user", "content": "Tom has 3 apples and buys 4. How many?"}]}
FREE: dict[str, Any] = {**PROBLEM, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
FORMED = {**PROBLEM, "max_tokens": 40, "guided_regex": "[a-z ]{10,30}"}


class Panic(BaseException):
    """As a panic of a library in Rust: no `Exception`."""


def panics(*_: object, **__: object) -> None:
    raise Panic("called `Option::unwrap()` on a `None` value")


class Served(NamedTuple):
    """A worker and a router in front of it."""

    cluster: Running
    url: str
    threads: list[threading.Thread]  # theirs; what tests before this left may end at any time


@contextmanager
def served(path: Path) -> Iterator[Served]:
    before = set(threading.enumerate())
    model = {"path": str(path), "load_format": "safetensors", "dtype": "float32"}
    engine = {"threads": 1, "num_pages": 400, "max_num_reqs": 8}
    with (
        running({"model": model, "engine": engine}, num_prefill=0) as cluster,
        routed(path, cluster.members) as (_, url),
    ):
        ask(url, FREE)  # starts the last of the threads
        ours = set(threading.enumerate()) - before
        yield Served(cluster, url, [each for each in ours if each.name.startswith("kvlane-")])


@pytest.fixture(scope="module")
def usual() -> Iterator[Served]:
    with served(shallow()) as found:
        yield found


def ask(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=HANG_S)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def beside_others(served: Served, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """Responses to `bodies`; requests before, beside and after them get the usual answer."""
    cluster, url, threads = served
    expected = text_of(ask(url, FREE))
    with ThreadPoolExecutor(len(bodies) + 2) as pool:
        others = [pool.submit(ask, url, FREE) for _ in range(2)]
        found = [each.result() for each in [pool.submit(ask, url, body) for body in bodies]]
        assert [text_of(each.result()) for each in others] == [expected] * 2
    assert text_of(ask(url, FREE)) == expected
    assert not [thread.name for thread in threads if not thread.is_alive()]
    cluster.wait_idle()
    return found


def test_grammars_without_bounds_are_refused(usual: Served) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(90):
        deep = {"type": "object", "properties": {"a": deep}}
    asked = {
        "guided_regex": "((a|b){1,999}){1,999}c{999999}",
        "guided_grammar": "start: a\na: b\n",
        "guided_json": deep,
    }
    found = beside_others(usual, [{**PROBLEM, field: value} for field, value in asked.items()])
    assert [error_of(each) for each in found] == [(400, "invalid_value", name) for name in asked]


def assert_logged(caplog: pytest.LogCaptureFixture, found: httpx.Response, secret: str) -> None:
    """What a library said is in one line of the log, with the request's id, and not in the body."""
    [record] = [each for each in caplog.records if each.name == "kvlane.errors"]
    assert record.getMessage().startswith(f"req_id={found.headers['x-request-id']}")
    assert record.exc_info is not None
    assert secret in str(record.exc_info[1])
    assert secret not in found.text


LIMITED = LLParserLimits(max_lexer_states=3)


@pytest.mark.parametrize("field", ["guided_regex", "response_format", "tools"])
def test_a_grammar_that_grows_too_complex_names_its_field(usual: Served, field: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    asked: dict[str, dict[str, Any]] = {
        "guided_regex": {"guided_regex": "(ab|cd){4,30}"},
        "response_format": {
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}
        },
        "tools": {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required",
        },
    }
    with mock.patch("worker.draw.grammar.GRAMMAR_LIMITS", LIMITED):
        [found] = beside_others(usual, [{**PROBLEM, "max_tokens": 50, **asked[field]}])
    assert error_of(found) == (400, "invalid_value", field)
    message = found.json()["error"]["message"]
    assert message.startswith(f"{field}: ")
    assert "<state>" not in message


class Raising:
    """llguidance's matcher, of which one method panics the third time."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self._inner, self._name, self._calls = LLMatcher(*args, **kwargs), name, 0

    def deep_copy(self) -> "Raising":
        return self

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            self._calls += 1
            if self._calls == 3:
                panics()
        return getattr(self._inner, name)

    @staticmethod
    def fill(matcher: "Raising", *mask: Any) -> None:
        fill_next_token_bitmask(matcher._inner, *mask)


@pytest.mark.parametrize("name", ["consume_token", "is_error", "is_stopped"])
def test_a_matcher_that_panics_ends_its_request(usual: Served, name: str) -> None:
    with (
        mock.patch("worker.draw.grammar.LLMatcher", functools.partial(Raising, name)),
        mock.patch("worker.draw.grammar.bitmask.fill_next_token_bitmask", Raising.fill),
    ):
        body = {**FORMED, "guided_regex": f"[a-z ]{{10,30}}{name}"}  # not compiled yet
        found = beside_others(usual, [body])
    assert [error_of(each) for each in found] == [(500, "internal_error", None)]


def test_the_choices_of_a_request_share_one_compilation_off_the_engine(usual: Served) -> None:
    threads: list[str] = []

    def compiled(*args: Any, **kwargs: Any) -> LLMatcher:
        threads.append(threading.current_thread().name)
        return LLMatcher(*args, **kwargs)

    with mock.patch("worker.draw.grammar.LLMatcher", compiled):
        for _ in range(2):
            found = ask(
                usual.url, {**PROBLEM, "n": 8, "temperature": 2, "guided_regex": "[a-z]{9}X"}
            )
            texts = [choice["message"]["content"] for choice in found.json()["choices"]]
            assert all(len(text) == 10 and text.endswith("X") for text in texts)
    assert len(texts) == 8
    assert len(set(texts)) > 1
    assert len(threads) == 1
    assert threads[0].startswith("kvlane-grammar")
    usual.cluster.wait_idle()


@pytest.mark.parametrize(
    "target",
    [
        "worker.draw.grammar.LLMatcher",
        "worker.draw.grammar.bitmask.fill_next_token_bitmask",
        "router.text.trial._Process.ask",
    ],
)
@pytest.mark.parametrize("raised", [TypeError("eos_token"), Panic("unwrap")], ids=repr)
def test_whatever_llguidance_raises_ends_one_request(usual, target, raised, caplog) -> None:
    body = {**FORMED, "guided_regex": f"[a-z ]{{10,30}}{hash((target, str(raised)))}"}  # not cached
    with mock.patch(target, side_effect=raised):
        [found] = beside_others(usual, [body])
    assert error_of(found) == (500, "internal_error", None)
    assert_logged(caplog, found, str(raised))
    assert len(text_of(ask(usual[1], FORMED))) >= 10


@pytest.mark.parametrize("method", ["encode", "decode", "render"])
def test_whatever_tokenizer_and_template_raise_ends_one_request(usual, method, caplog) -> None:
    target = {
        "encode": "router.text.tokenizer.Text.encode",
        "decode": "router.text.output.OutputText.feed",
        "render": "router.text.template.ChatTemplate.render",
    }[method]
    cluster, url, _ = usual
    expected = text_of(ask(url, FREE))
    for streamed in (False, True):
        with mock.patch(target, side_effect=Panic("index out of bounds")):
            found = ask(url, {**FREE, "stream": streamed})
        assert error_of(found) == (500, "internal_error", None)
        assert_logged(caplog, found, "index out of bounds")
        caplog.clear()
        assert text_of(ask(url, FREE)) == expected
    cluster.wait_idle()


def test_a_request_whose_grammar_compiles_holds_nothing_up_and_may_be_given_up(
    usual: Served,
) -> None:
    gate, worker = threading.Event(), usual.cluster.workers["decode-0"]

    def compiled(*args: Any, **kwargs: Any) -> LLMatcher:
        assert gate.wait(HANG_S)
        return LLMatcher(*args, **kwargs)

    def until_compiling(num: int) -> None:
        while worker.counters()["compiling"] != num:
            usual.cluster.client.pump(0.01)

    body = {**PROBLEM, "n": 3, "guided_regex": "[0-9]{4}y"}
    expected = text_of(ask(usual.url, FREE))
    free = worker.engine.book.num_available
    with mock.patch("worker.draw.grammar.LLMatcher", compiled), ThreadPoolExecutor(2) as pool:
        stays = pool.submit(ask, usual.url, body)
        until_compiling(3)
        assert worker.counters()["requests"] == 0
        assert worker.engine.book.num_available == free
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{usual.url}/v1/chat/completions", json=body, timeout=2)
        until_compiling(3)
        assert text_of(ask(usual.url, FREE)) == expected
        gate.set()
        assert len(stays.result().json()["choices"]) == 3
    usual.cluster.wait_idle()


# Its template raises, or runs on, as `chat_template_kwargs` say.
RAISING = (
    "{% macro turn(m) %}{% for c in m.content %}{{ c }}{% endfor %}{% endmacro %}"
    "{% if how == 'raise' %}{{ raise_exception('no such thing') }}{% endif %}"
    "{% if how == 'type' %}{{ 1 + messages }}{% endif %}"
    "{% if how == 'deep' %}{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}{% endif %}"
    "{% if how == 'loop' %}{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% if how == 'big' %}{{ 'a'.ljust(99999999999999) }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ turn(m) }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def changed(path: Path, file: str, **fields: Any) -> Path:
    """A copy of the bundled model with other fields in one of its files."""
    shutil.copytree(TINY, path, dirs_exist_ok=True)
    held = json.loads((path / file).read_text(encoding="utf-8"))
    (path / file).write_text(json.dumps(held | fields), encoding="utf-8")
    return path


def test_a_template_that_raises_or_runs_on_is_400(tmp_path: Path) -> None:
    model = changed(tmp_path, "tokenizer_config.json", chat_template=RAISING)
    with served(model) as found:
        hows = dict.fromkeys(("raise", "type", "deep", "loop", "big"), "invalid_value")
        hows["loop"] = "context_length_exceeded"
        bodies = [{**PROBLEM, "chat_template_kwargs": {"how": how}} for how in hows]
        told = map(error_of, beside_others(found, bodies))
        assert [*told] == [(400, code, "messages") for code in hows.values()]


def test_a_tokenizer_that_llguidance_cannot_use_is_400(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked: dict[str, dict[str, Any]] = {
        "guided_regex": {"guided_regex": "a"},
        "tools": {"tools": tools, "tool_choice": "required"},
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    with served(changed(tmp_path, "tokenizer.json", decoder=decoder)) as found:
        responses = beside_others(found, [{**PROBLEM, **more} for more in asked.values()])
        assert [error_of(each) for each in responses] == [
            (400, "unsupported", field) for field in asked
        ]
