"""Requests of every kind over so few pages and rows that they wait for, preempt and share; random
delays between everything that a worker does on the host, on the device and on the wire.

On a CPU the device is the runner's stream thread, and a delay is a sleep in it. On CUDA a delay is
a kernel that spins, enqueued where the sleep would be; the host runs ahead of it.
"""

import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from llguidance import LLMatcher

from tests.support.engines import Answer
from tests.support.lockstep import DECODE, Ask
from tests.support.pairwise import whole
from tests.support.prompts import problem_ids
from tests.support.pulls import WrappedPeer, WrappedPull
from tests.support.shallow import shallow
from worker.api import FinishReason, PeerId, Sampling
from worker.run.flight import Step
from worker.transfer.base import Pull, PullState

ROWS = 8
NUM_LEAVING = 20
NUM_PAGES = 56
Plain = tuple[list[Ask], list[Answer]]  # requests, and their answers without what is tested
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, \
"required": ["a"], "additionalProperties": false}'


def sections(
    device: str, mode: str, num_groups: int = 1, first_token: str = "prefill", **engine: object
) -> dict[str, dict[str, object]]:
    """Few pages of 16 tokens, few rows, small chunks."""
    path, transport = str(shallow()), {"name": "shm"}
    if device == "cuda":
        path, transport = "tiny", {"name": "mooncake", "kind": "tcp"}
    return {
        "model": {"path": path, "dtype": "float32", "max_model_len": 512},
        "kv": {"page_size": 16, "num_groups": num_groups},
        "engine": {
            "device": device, "threads": 1, "num_pages": NUM_PAGES, "max_num_reqs": ROWS,
            "max_prefill_tokens": 23, "growth_tokens": 1, "penalty_rows": 2, **engine,
        },
        "disaggregation": {"mode": mode, "first_token": first_token},
        "transport": transport,
    }  # fmt: skip


def kinds() -> list[Sampling]:
    """One of each kind; the seeds are set by `mix`."""
    drawn = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
    return [
        Sampling(40, temperature=0.0),
        Sampling(14, **drawn),
        Sampling(12, temperature=0.0, logprobs=3),
        Sampling(14, **drawn, presence_penalty=1.0, repetition_penalty=1.3),
        Sampling(30, temperature=0.0, ignore_eos=True),
        Sampling(17, temperature=1.2, min_p=0.02, min_tokens=8),
        Sampling(20, **drawn, stop_ids=(95, 833)),
        Sampling(10, temperature=0.0, frequency_penalty=0.5, logit_bias=((40, 3.0),)),
        Sampling(24, temperature=0.7, stop_ids=(601, 81)),
    ]


def mix(*, entire: bool = whole) -> list[Ask]:
    """The requests, in waves; those with grammars and logprobs come late, as they change the tail.

    Some clients leave while a step of theirs is in flight, so that others pull into their pages.
    Two thirds of all unless `entire`.
    """
    num_of_a_kind, num_cut_short = (3, 8) if entire else (2, 5)
    prompts, asked = problem_ids(40), []
    for number, sampling in enumerate(kinds() * num_of_a_kind):
        ask = Ask(prompts[number], sampling, 4 * (number // 3), local=number % 7 == 3)
        asked.append(ask.but(seed=number))
    for number, ask in list(enumerate(asked))[1::9]:  # n = 2
        asked.append(replace(ask, after=number, local=False).but(seed=50 + number))
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA)
    for number in range(3):
        asked.append(Ask(prompts[30 + number], Sampling(24, seed=number, grammar=grammar), 60))
    long = Sampling(30, temperature=0.0, ignore_eos=True)
    for number in range(num_cut_short):
        cut = 5 + number if number % 2 else 1
        asked.append(Ask(prompts[33 + number % 7], long, 3 + 6 * number, cut=cut))
        asked.append(Ask(prompts[20 + number], long, 2 + 7 * number, abort=3 + number))
        asked.append(Ask(prompts[number], long, 7 * number, local=True, abort=5 + number))
    return asked


def seeded_mix() -> list[Ask]:
    """`mix`, each request with a seed of its own, by which a drafter can know it."""
    return [ask.but(seed=1000 + number) for number, ask in enumerate(mix())]


def leaving() -> list[Ask]:
    """Clients that leave during their local prefill, while others pull into whatever is free."""
    prompts, asked = problem_ids(40), []
    short = Sampling(6, temperature=0.0, ignore_eos=True)
    for number in range(NUM_LEAVING):
        at = 4 * number
        noise = sum((prompts[(number + i) % 40] for i in range(1, 6)), ())
        asked.append(Ask((40 + number, *noise), short, at, local=True, abort_in_chunk=True))
        for pulled in (prompts[number], tuple(reversed(prompts[number]))):
            asked.append(Ask((60 + number, *pulled), short, at))
    return asked


def differing(
    asked: Sequence[Ask], found: Sequence[Answer], wanted: Sequence[Answer], *, exact: bool
) -> list[int]:
    """Numbers of requests whose answers differ.

    Of those that were aborted what both runs gave is compared. Logprobs of different batches, if
    not `exact`, agree to rounding.
    """
    different = []
    for number, (ask, one, other) in enumerate(zip(asked, found, wanted, strict=True)):
        if FinishReason.ABORT in (one.finish_reason, other.finish_reason):
            assert ask.abort is not None or ask.abort_in_chunk
            num = min(len(one.tokens), len(other.tokens))
            same = one.tokens[:num] == other.tokens[:num]
        else:
            same = one.tokens == other.tokens and one.finish_reason == other.finish_reason
            same = same and same_logprobs(one, other, 0.0 if exact else 1e-3)
        if not same:
            different.append(number)
    return different


def same_logprobs(one: Answer, other: Answer, tolerance: float) -> bool:
    pairs = list(zip(one.logprobs, other.logprobs, strict=True))
    return all(
        abs(a.logprob - b.logprob) <= tolerance
        and len(a.top) == len(b.top)
        and (tolerance > 0 or a.top == b.top)
        for a, b in pairs
    )


SHORT_S = 0.002
CYCLES_PER_S = 1.5e9  # of a GPU, roughly


class Delays:
    """Puts delays into the `loops` and `engines` of `served`, drawn from `seed`.

    Those on the device are up to `longest_s`, at a `share` of the places each time; of the worker
    that is not `slowest` they are shorter, so that messages and pulls overtake the other's steps.
    """

    def __init__(
        self,
        served: Any,
        seed: int,
        longest_s: float = SHORT_S,
        slowest: PeerId = DECODE,
        share: float = 0.5,
    ) -> None:
        self._share = share
        self._host, self._stream = random.Random(seed), random.Random(seed + 1000)
        self._pulls = random.Random(seed + 2000)
        self.num_on_device = 0
        for loop in served.loops.values():
            self._wrap(loop.scheduler, "plan", self._sleep)
        for peer, engine in served.engines.items():
            runner: Any = engine.runner
            device = functools.partial(
                self._delay_device, longest_s if peer == slowest else longest_s / 8,
                spins=engine.pool.device.type == "cuda",
            )  # fmt: skip
            for name in ("run", "forward", "tail", "draw"):
                self._wrap(runner, name, device)
            for graphs in (runner.graphs.chunks, runner.graphs.decode):
                self._wrap(graphs, "launch", device)  # between the change of rows and the forward
            self._delay_steps(runner, device)
            if peer == DECODE:
                transport: Any = engine.transport
                connect = transport.connect
                transport.connect = lambda *args, _real=connect: WrappedPeer(
                    _real(*args), lambda pull: SlowPull(pull, self._pulls)
                )

    def _wrap(self, owner: Any, name: str, delay: Callable[[], None]) -> None:
        real = getattr(owner, name)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            delay()
            result = real(*args, **kwargs)
            delay()
            return result

        setattr(owner, name, delayed)

    def _delay_steps(self, runner: Any, delay: Callable[[], None]) -> None:
        """Before and after a layer group is said to be final, between launching a step and settling
        the one before, and around the wait itself.
        """
        real, real_tail = runner.launch, runner.launch_tail

        def launch(plan: Any, groups: Any = None, shape: Any = None) -> Any:
            if groups is not None:
                self._wrap(groups, "on_layer", delay)
            step = real(plan, groups, shape)
            if isinstance(step, Step):
                self._wrap(step.outcome, "wait", self._sleep)
            self._sleep()
            return step

        def launch_tail(*args: Any) -> Step:
            step = real_tail(*args)
            self._wrap(step.outcome, "wait", self._sleep)
            return step

        runner.launch, runner.launch_tail = launch, launch_tail

    def _sleep(self) -> None:
        time.sleep(self._host.choice([0.0, 0.0, SHORT_S / 4, SHORT_S]))

    def _delay_device(self, longest_s: float, *, spins: bool) -> None:
        if self._stream.random() < self._share:
            self.num_on_device += 1
            took_s = self._stream.random() * longest_s
            torch.cuda._sleep(int(took_s * CYCLES_PER_S)) if spins else time.sleep(took_s)


class SlowPull(WrappedPull):
    """Now and then it does nothing when it is polled."""

    def __init__(self, pull: Pull, rng: random.Random) -> None:
        super().__init__(pull)
        self._rng = rng

    def poll(self) -> PullState:
        return PullState.RUNNING if self._rng.random() < 0.5 else super().poll()
