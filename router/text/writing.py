"""How much one rendering of a chat template may write, and for how long: counted as it goes.

A template is the operator's, but what it writes is made of what a client sends: a few kilobytes
become gigabytes where it indents what is deep, or says something again with every message.
"""

import json
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from worker.errors import KvlaneError, UserError

MAX_TURNS = 1_000_000  # of all loops
MAX_CPU_S = 2.0  # of its thread
PIECES = 16  # times the text, of all parts that are put together on the way to it
# What may be rendered where others wait for it.
QUICK_CHARS, QUICK_TURNS, QUICK_CPU_S = 1 << 16, 4096, 0.005
LOOK_TURNS = 16  # between two looks at the clock
COUNTED, SIZED = "_counted", "_sized"  # filters: jinja2 calls these for a tenth of a name's cost


class TooMuch(UserError):
    """A rendering has passed a bound, which the message names."""


class Slow(KvlaneError):
    """A rendering that had to be quick is none; nothing is wrong with it."""


class Writing:
    """One rendering."""

    def __init__(self, max_chars: int, *, is_quick: bool) -> None:
        self._kind = Slow if is_quick else TooMuch
        self._max_chars = min(max_chars, QUICK_CHARS) if is_quick else max_chars
        self._max_turns = QUICK_TURNS if is_quick else MAX_TURNS
        self._max_cpu_s = QUICK_CPU_S if is_quick else MAX_CPU_S
        self._left, self._turns = PIECES * self._max_chars, 0
        self._until = time.thread_time() + self._max_cpu_s

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Passes on what a loop runs over."""
        for value in values:
            self._turns += 1
            if self._turns > self._max_turns:
                raise self._kind(f"takes more than {self._max_turns} turns of loops")
            if self._turns % LOOK_TURNS == 0:
                self._look()
            yield value

    def sized(self, value: Any) -> Any:
        """Passes on a part of a text."""
        if isinstance(value, str):
            self._left -= len(value)
            if self._left < 0:
                self._refuse()
        return value

    def joined(self, parts: Iterable[str]) -> str:
        """What parts are together."""
        return "".join(map(self.sized, parts))

    def whole(self, text: str) -> str:
        """Passes on all of it."""
        if len(text) > self._max_chars:
            self._refuse()
        return text

    def _refuse(self) -> None:
        raise self._kind(f"writes more than {self._max_chars} characters of them")

    def _look(self) -> None:
        if time.thread_time() > self._until:
            raise self._kind(f"takes more than {self._max_cpu_s:g} s of CPU time for them")


class _Thread(threading.local):
    writing: Writing | None = None  # the rendering that runs
    is_quick = False


_thread = _Thread()


@contextmanager
def quickly() -> Generator[None]:
    """Renderings of this thread are quick meanwhile, or end with `Slow`."""
    _thread.is_quick = True
    try:
        yield
    finally:
        _thread.is_quick = False


def within(max_chars: int, render: Callable[[], str]) -> str:
    """What `render` writes, of so many characters at most; raises TooMuch or Slow."""
    writing = _thread.writing = Writing(max_chars, is_quick=_thread.is_quick)
    try:
        return writing.whole(render())
    finally:
        _thread.writing = None


def _joined(parts: Iterable[str]) -> str:
    return "".join(parts) if _thread.writing is None else _thread.writing.joined(parts)


@pass_context  # so that nothing is called while a template is compiled
def _counted(_: Context, values: Iterable[Any]) -> Iterable[Any]:
    return values if _thread.writing is None else _thread.writing.counted(values)


@pass_context
def _sized(_: Context, value: Any) -> Any:
    return value if _thread.writing is None else _thread.writing.sized(value)


class CountingEnvironment(ImmutableSandboxedEnvironment):
    """Counts turns of `for` loops, and the parts of every text that a template puts together."""

    concat = staticmethod(_joined)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        made = {COUNTED: _counted, SIZED: _sized}
        self.filters |= made  # pyright: ignore[reportUnknownMemberType]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = self._through(COUNTED, loop.iter)
        for sum_ in list(template.find_all(nodes.Add)):
            sum_.left, sum_.right = (self._through(SIZED, x) for x in (sum_.left, sum_.right))
        for text in list(template.find_all(nodes.Concat)):
            text.nodes = [self._through(SIZED, x) for x in text.nodes]
        return template

    def _through(self, name: str, value: Any) -> nodes.Filter:
        filtered = nodes.Filter(value, name, [], [], None, None)
        filtered.set_lineno(value.lineno).set_environment(self)
        return filtered


def to_json(value: Any, indent: int | str | None, **how: Any) -> str:
    """JSON, counted; how: as `json.dumps` has it."""
    writing = _thread.writing
    if writing is None or indent is None:
        text = json.dumps(value, indent=indent, **how)
        return text if writing is None else writing.sized(text)
    return writing.joined(json.JSONEncoder(indent=indent, **how).iterencode(value))
