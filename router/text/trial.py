"""Grammars are tried in processes of their own: nothing bounds what one may cost until it compiles.

A process that passes its limit of CPU time or memory is killed by the kernel, which refuses the
grammar, and the next grammar gets a new one.
"""

import json
import math
import queue
import resource
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import llguidance.numpy as bitmask
from llguidance import LLMatcher, LLTokenizer

from worker.config.checkpoint.grammar_tokens import grammar_tokenizer
from worker.config.checkpoint.tokens import read_tokens
from worker.config.limits import GRAMMAR_LIMITS
from worker.errors import Busy

NUM_PROCESSES = 2
MAX_KNOWN = 1024  # answers that are kept
WAIT_S = 5.0  # for one of them to be free
HANG_S = 60.0  # of the clock, on a machine that is too busy to give it its CPU time
REFUSED = "it is malformed"  # for want of llguidance's own words
# With this llguidance panics where it shortens what it says of a schema: within a character.
CUT = "is not a char boundary"
TOO_MUCH = "it takes too much time or memory to compile"
MAIN = "import sys; sys.path[:] = {path!r}; from router.text.trial import main; main()"


class Verdict(NamedTuple):
    """What llguidance says of a grammar."""

    error: str  # why no model can follow it, or ""
    warnings: tuple[str, ...] = ()  # what of its schemas is not kept to
    is_usable: bool = True  # the model's tokenizer; if not, `error` says why


class Trials:
    """Says whether a model can follow a grammar. Its processes start as they are needed."""

    def __init__(
        self, directory: Path, vocab_size: int, *, cpu_s: int = 2, memory_bytes: int = 128 << 20
    ) -> None:
        self._arguments = [str(directory), str(vocab_size), str(cpu_s), str(memory_bytes)]
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(NUM_PROCESSES):
            self._free.put(None)
        self._known: dict[bytes, Verdict] = {}  # answers by the digests of grammars
        self._lock = threading.Lock()

    def verdict(self, grammar: str) -> Verdict:
        """Whether a model can follow `grammar`; RuntimeError if llguidance failed over it."""
        key = blake2b(grammar.encode()).digest()
        if (known := self._known.get(key)) is not None:
            return known
        try:
            process = self._free.get(timeout=WAIT_S)
        except queue.Empty:
            raise Busy("too many grammars are being compiled", WAIT_S) from None
        try:
            if (known := self._known.get(key)) is not None:  # somebody else asked meanwhile
                return known
            if process is None or not process.lives:
                process = None
                process = _Process(self._arguments)
            answer = process.ask(grammar)
        finally:
            self._free.put(process)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        usable = answer.get("is_usable", True)
        known = Verdict(answer["error"], tuple(answer.get("warnings", ())), usable)
        if not usable:
            return known
        with self._lock:
            self._known[key] = known
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return known


class _Process:
    """One process, which answers a line of JSON with another."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-c", MAIN.format(path=sys.path), *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked, self._said = self._process.stdin, self._process.stdout
        self._end = weakref.finalize(self, _end, self._process)
        if self._answer() is None:
            raise RuntimeError("a process that tries grammars does not start")

    @property
    def lives(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def ask(self, grammar: str) -> dict[str, Any]:
        """Its answer, also if it has not survived the grammar."""
        with suppress(BrokenPipeError):
            self._asked.write(json.dumps(grammar).encode() + b"\n")
        answer = self._answer()
        if answer is None or answer["is_worn"]:
            self._end()
        return answer or {"error": TOO_MUCH}

    def _answer(self) -> dict[str, Any] | None:
        timer = threading.Timer(HANG_S, self._process.kill)
        timer.start()
        line = self._said.readline()
        timer.cancel()
        return json.loads(line) if line.endswith(b"\n") else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    with process:  # waits for it and closes its pipes
        process.kill()


def main() -> None:
    """The process itself: the model, size of its vocabulary, and its limits for one grammar."""
    directory, vocab_size, cpu_s, memory_bytes = sys.argv[1], *map(int, sys.argv[2:])
    made: LLTokenizer | Exception
    try:
        made = grammar_tokenizer(read_tokens(Path(directory)).file, vocab_size)
    except (OSError, ValueError) as error:
        made = error
    _limit(resource.RLIMIT_CORE, 0)
    _tell({})
    used = _data_bytes()
    for line in sys.stdin.buffer:
        if used:
            _limit(resource.RLIMIT_DATA, used + memory_bytes)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_s)
        try:
            answer: dict[str, Any] = _verdict(json.loads(line), made)._asdict()
        except BaseException as error:  # a panic of a library in Rust is no `Exception`
            answer = {"error": REFUSED} if CUT in str(error) else {"failed": repr(error)}
        is_worn = isinstance(made, OSError) or _data_bytes() > used + memory_bytes // 2
        _tell(answer | {"is_worn": is_worn})


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _tell(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _data_bytes() -> int:
    """Memory of this process of the kind that RLIMIT_DATA counts; 0: not known here."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def _verdict(grammar: str, tokenizer: LLTokenizer | Exception) -> Verdict:
    if isinstance(tokenizer, Exception):
        return Verdict(str(tokenizer), is_usable=False)
    failed, words = LLMatcher.validate_grammar_with_warnings(
        grammar, tokenizer, limits=GRAMMAR_LIMITS
    )
    if failed:
        return Verdict(words[0])
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=GRAMMAR_LIMITS)
    if not matcher.is_error():
        first = bitmask.allocate_token_bitmask(1, tokenizer.vocab_size)
        bitmask.fill_next_token_bitmask(matcher, first)
    error = matcher.get_error().partition("\n<state>")[0] if matcher.is_error() else ""
    return Verdict(error, tuple(words))
