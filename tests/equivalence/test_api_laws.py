"""Penalties, biases, grammars, logprobs and further choices: the same whatever serves them.

One request at a time in one process is compared with `transformers`, the changes of its logits made
in float64; everything else with one request at a time. All in float32.
"""

import functools
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tests.support import pairwise
from tests.support.engines import Answer, Client, Running, running, value
from tests.support.laws import ended, sections
from tests.support.prompts import EOS, VOCAB, ll_tokenizer, problem_ids, tokenizer
from tests.support.shallow import shallow
from tests.unit.test_sampler import Case, change, exact
from worker.api import FinishReason, Sampling
from worker.ops.philox import gumbel_ref

NUM = 18 if pairwise.whole else 12
GREEDY = Sampling(24, temperature=0.0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "total": {"type": "integer", "minimum": 0, "maximum": 500},
        "unit": {"enum": ["kg", "km", "none"]},
    },
    "required": ["name", "total", "unit"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = {
    "free": "",
    "schema": LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)),
    "regex": LLMatcher.grammar_from_regex(r"[A-Z][a-z]{3,12}( [0-9]{1,4}){2,5}\."),
    "choice": LLMatcher.grammar_from_lark('start: "yes" | "no" | "one hundred and twelve apples"'),
}


def token_of(text: str) -> int:
    return tokenizer().encode(text, add_special_tokens=False).ids[0]


def wish(rng: random.Random, grammar: str, num_top: int) -> Sampling:
    """One request with most of what an API client can ask for."""
    biased = rng.sample(range(3, VOCAB), 6)
    return Sampling(
        max_tokens=rng.choice([24, 36] if pairwise.whole else [20, 30]),
        temperature=rng.choice([0.0, 0.7, 1.2]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 40]),
        min_p=rng.choice([0.0, 0.02]),
        seed=rng.getrandbits(62),
        ignore_eos=rng.random() < 0.2,
        stop_ids=tuple(rng.choice([(), (token_of("."), token_of(" the")), (token_of("5"),)])),
        min_tokens=rng.choice([0, 0, 9]),
        presence_penalty=rng.choice([0.0, 0.9, -0.4]),
        frequency_penalty=rng.choice([0.0, 0.5, -0.2]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.9]),
        logit_bias=tuple((i, rng.uniform(-4, 6)) for i in biased) if rng.random() < 0.4 else (),
        logprobs=num_top,
        grammar=GRAMMARS[grammar],
    )


@functools.cache
def wishes() -> tuple[Sampling, ...]:
    rng = random.Random(23)
    kinds = list(GRAMMARS)
    made = tuple(wish(rng, kinds[i % len(kinds)], [-1, 0, 3][i % 3]) for i in range(NUM))
    assert NUM // 4 < sum(each.changes_logits for each in made) < NUM
    assert sum(each.temperature == 0 for each in made) > 1
    return made


def same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Ids and reasons equal, logprobs as near as float32 in another batch allows."""
    for one, other in zip(ended(found), expected, strict=True):
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        assert len(one.logprobs) == len(other.logprobs)
        for each, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert each.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [i for i, _ in each.top] == [i for i, _ in wanted.top]
            assert [v for _, v in each.top] == pytest.approx([v for _, v in wanted.top], abs=1e-4)


@pytest.fixture(scope="module")
def expected(alone: Running) -> list[Answer]:
    return [
        ended(alone.client.generate([prompt], sampling))[0]
        for prompt, sampling in zip(problem_ids(NUM), wishes(), strict=True)
    ]


# The oracle.


def case_of(prompt: Sequence[int], output: Sequence[int], sampling: Sampling) -> Case:
    """What the next token's distribution depends on, beside the logits."""
    permitted = allowed(sampling, [*output]) if sampling.grammar else set[int]()
    early = {*sampling.stop_ids, *(() if sampling.ignore_eos else (EOS,))}
    masked = len(output) < sampling.min_tokens and not (permitted and permitted <= early)
    return Case(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, tuple(early), masked,
        sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty,
        sampling.logit_bias, tuple(prompt), tuple(output), permitted,
    )  # fmt: skip


def allowed(sampling: Sampling, output: list[int]) -> set[int]:
    matcher = LLMatcher(ll_tokenizer(), sampling.grammar)
    assert matcher.consume_tokens(output), "the output breaks its grammar"
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB]).tolist())


def draw(logits: torch.Tensor, case: Case, seed: int, position: int) -> int:
    """The token that the noise of this seed and position picks."""
    if case.temperature == 0:
        return int(change(logits.double().numpy(), case).argmax())
    noise = gumbel_ref(torch.tensor([seed]), torch.tensor([position]), VOCAB)[0]
    with np.errstate(divide="ignore"):  # of what cannot be drawn
        return int((np.log(exact(logits, case)) + noise.double().numpy()).argmax())


def test_one_at_a_time_equals_transformers(alone: Running, expected: list[Answer]) -> None:
    """Greedy requests that ask for nothing else, too."""
    from transformers import Qwen3ForCausalLM  # seconds, where these tests run only

    model = Qwen3ForCausalLM.from_pretrained(shallow(), dtype=torch.float32)
    num_logprobs = num_tokens = 0
    asked = list(zip(problem_ids(NUM), wishes(), expected, strict=True))
    for prompt in problem_ids(NUM):
        asked.append((prompt, GREEDY, ended(alone.client.generate([prompt], GREEDY))[0]))
    for prompt, sampling, answer in asked:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        thought = logits.double().log_softmax(-1)
        assert len(answer.logprobs) == (len(answer.tokens) if sampling.logprobs >= 0 else 0)
        for at, each in enumerate(answer.logprobs):
            assert each.logprob == pytest.approx(thought[at, answer.tokens[at]].item(), abs=1e-4)
            values, ids = thought[at].topk(sampling.logprobs)
            assert [i for i, _ in each.top] == ids.tolist()
            assert [v for _, v in each.top] == pytest.approx(values.tolist(), abs=1e-4)
            num_logprobs += 1
        for at, token in enumerate(answer.tokens):
            case = case_of(prompt, answer.tokens[:at], sampling)
            assert math.isfinite(change(logits[at].double().numpy(), case)[token]), (at, token)
            assert token == draw(logits[at], case, sampling.seed, len(prompt) + at)
            num_tokens += 1
    assert num_logprobs > 100
    assert num_tokens > 400


def test_the_wishes_matter(alone: Running, expected: list[Answer]) -> None:
    """What is tested here would show: hardly any text is that of the same request without it."""
    plain = [
        msgspec.structs.replace(
            each, grammar="", logit_bias=(), presence_penalty=0.0, frequency_penalty=0.0,
            repetition_penalty=1.0, min_tokens=0,
        )
        for each in wishes()
    ]  # fmt: skip
    others = ended(alone.client.generate(problem_ids(NUM), plain))
    pairs = zip(others, expected, strict=True)
    assert sum(one.tokens == other.tokens for one, other in pairs) < NUM // 2
    reasons = {each.finish_reason for each in expected}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


# Whatever serves them.


@pytest.mark.product(
    place=("always", "never"),
    max_prefill_tokens=(None, 23),
    pages=("many", "few"),
    penalty_rows=(None, 1),
    transport=("shm/shm", *pairwise.more("mooncake/tcp")),
)
def test_whatever_serves_a_request_changes_nothing(
    place, max_prefill_tokens, pages, penalty_rows, transport, expected: list[Answer]
) -> None:
    """With one row for penalties, requests wait for it."""
    changes = {"max_prefill_tokens": max_prefill_tokens, "penalty_rows": penalty_rows}
    config = sections(place, **{name: n for name, n in changes.items() if n is not None})
    config["transport"] = dict(zip(("name", "kind"), transport.split("/"), strict=True))
    longest = max(len(prompt) for prompt in problem_ids(NUM)) + 40
    few = {"engine": {"num_pages": 3 * -(-longest // 16), "growth_tokens": 1}}
    with running(config, decode_sections=few if pages == "few" else None) as cluster:
        for _ in range(2 if penalty_rows is None else 1):  # cold, then with what the trees kept
            same(cluster.client.generate(problem_ids(NUM), wishes()), expected)
        preempted = value(cluster.workers["decode-0"].engine.metrics.preemptions)
    if pages == "few":
        assert preempted > 0, "the pool was not small enough to show anything"


def test_alone_equals_among_64_others(alone: Running, expected: list[Answer]) -> None:
    rng = random.Random(3)
    others = [tuple(reversed(prompt)) for prompt in problem_ids(64)]
    kinds = list(GRAMMARS)
    pairs = [*zip(problem_ids(NUM), wishes(), strict=True)][:8]
    pairs += [(prompt, GREEDY) for prompt in problem_ids(4)]
    wanted = [*expected[:8], *alone.client.generate(problem_ids(4), GREEDY)]
    with running(sections()) as cluster:
        client = cluster.client
        crowd = [
            client.submit(prompt, wish(rng, kinds[i % 4], rng.choice([-1, 0, 5, 20])))
            for i, prompt in enumerate(others)
        ]
        sent = [client.submit(prompt, sampling) for prompt, sampling in pairs]
        same(client.wait(sent), wanted)
        ended(client.wait(crowd))


def test_a_grammar_goes_before_min_tokens(alone: Running) -> None:
    """Nothing but a stop token may follow, and it is too early for one."""
    prompt = problem_ids(1)[0]
    ends = LLMatcher.grammar_from_regex("yes(  )?")
    needs = LLMatcher.grammar_from_regex("yyy(  )?")
    for temperature in (0.0, 1.0):
        sampling = Sampling(20, temperature, 0.9, min_tokens=15, stop_ids=(token_of("y"),))
        for grammar in (ends, needs):
            asked = msgspec.structs.replace(sampling, grammar=grammar)
            answer = ended(alone.client.generate([prompt], asked))[0]
            text = tokenizer().decode(answer.tokens).strip()
            assert text == ("yes" if grammar == ends else "yyy")
            assert answer.finish_reason is FinishReason.STOP
    alone.wait_idle()


IMPOSSIBLE: list[tuple[Any, Sampling, str | None]] = [
    ([1, 2], Sampling(5, grammar="this is no grammar"), "grammar"),
    ([1, 2], Sampling(5, logit_bias=((VOCAB, 1.0),)), "logit_bias"),
    ([1, 2], Sampling(5, logprobs=21), "top_logprobs"),
    ([1, 2], Sampling(5, stop_ids=(-1,)), "stop_token_ids"),
    ([1, 2], Sampling(5, stop_ids=tuple(range(40))), None),
    ([1, 2], Sampling(5, temperature=float("nan")), "temperature"),
    ([1, 2], Sampling(10**6), None),
    ([], GREEDY, None), ([1] * 70_000, GREEDY, None), ([10**6], GREEDY, None),
]  # fmt: skip


def test_what_no_worker_can_follow_is_refused_with_a_reason(alone: Running) -> None:
    for tokens, sampling, param in IMPOSSIBLE:
        (answer,) = alone.client.generate([tokens], sampling)
        assert answer.error is not None
        assert answer.error.code == "invalid_value"
        assert param in (answer.error.param, None)
    alone.wait_idle()


# Further choices of a request.


def choices(num: int = 5) -> list[Sampling]:
    rng = random.Random(31)
    kinds = ["free", "schema", "free", "regex", "choice"]
    return [
        msgspec.structs.replace(
            wish(rng, kinds[i % 5], 3), temperature=1.1, seed=77 + i, min_tokens=22, stop_ids=()
        )
        for i in range(num)
    ]


# Its KV ends within a page, so that every choice has a rest of its own to prefill.
SHORT = next(prompt for prompt in problem_ids(9) if (len(prompt) - 1) % 16 > 2)
LONG = tuple(i % 900 + 50 for i in range(300))


@pytest.fixture(scope="module")
def separate(alone: Running) -> dict[tuple[int, ...], list[Answer]]:
    return {
        prompt: [ended(alone.client.generate([prompt], each))[0] for each in choices()]
        for prompt in (SHORT, LONG)
    }


def ask(client: Client, prompt: tuple[int, ...]) -> list[str]:
    """All choices at once, the others after the first."""
    first, *others = choices()
    parent = client.submit(prompt, first)
    return [parent, *(client.submit(prompt, each, after=parent) for each in others)]


def until_held(cluster: Running, num: int) -> None:
    while cluster.workers["decode-0"].counters()["siblings"] != num:
        cluster.client.pump(0.001)
        assert cluster.workers["decode-0"].counters()["requests"] <= 1, "the first was too fast"


def check_choices(
    cluster: Running, separate: dict, prompt: tuple[int, ...] = SHORT
) -> list[Answer]:
    """All choices of a prompt at once: each is as it was alone."""
    answers = cluster.client.wait(ask(cluster.client, prompt))
    same(answers, separate[prompt])
    cluster.wait_idle()
    return answers


def whole_pages(prompt: Sequence[int]) -> int:
    """Tokens of a prompt that further choices find cached."""
    return (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize(
    ("transport", "kind"), [("shm", "shm"), *pairwise.in_whole(("mooncake", "tcp"))]
)
def test_choices_pull_their_prompt_once(transport: str, kind: str, separate: dict) -> None:
    config = {**sections(), "transport": {"name": transport, "kind": kind}}
    with running(config) as cluster:
        answers, whole = check_choices(cluster, separate), whole_pages(SHORT)
        assert [each.num_cached_tokens for each in answers] == [0, *[whole] * 4]
        decode, prefill = (cluster.workers[f"{role}-0"].engine for role in ("decode", "prefill"))
        pulled = value(decode.metrics.pulled_bytes(f"{transport}/{kind}"))
        assert pulled == -(-(len(SHORT) - 1) // 16) * decode.layout.page_bytes
        assert value(prefill.metrics.prompt_tokens) == len(SHORT) - 1
        assert value(decode.metrics.prompt_tokens) == 4 * (len(SHORT) - whole)


def test_choices_compute_their_prompt_once(separate: dict) -> None:
    with running(sections("never", max_prefill_tokens=64)) as cluster:
        metrics = cluster.workers["decode-0"].engine.metrics
        for prompt in separate:
            before, whole = value(metrics.prompt_tokens), whole_pages(prompt)
            answers = check_choices(cluster, separate, prompt)
            assert [each.num_cached_tokens for each in answers] == [0, *[whole] * 4]
            computed = value(metrics.prompt_tokens) - before
            assert computed == len(prompt) + 4 * (len(prompt) - whole)


@pytest.mark.parametrize("few_pages", [False, True])
def test_choices_that_share_little_or_are_preempted(few_pages: bool, separate: dict) -> None:
    few = {"engine": {"num_pages": -(-len(SHORT) // 16) + 4, "growth_tokens": 1}}
    config = sections("always", prefix_cache=few_pages)
    config["model"]["max_model_len"] = len(SHORT) + 36
    with running(config, decode_sections=few if few_pages else None) as cluster:
        for _ in range(1 + few_pages):
            check_choices(cluster, separate)
        assert few_pages == (value(cluster.workers["decode-0"].engine.metrics.preemptions) > 0)


@pytest.mark.parametrize("mode", pairwise.one_in(2, ["always", "never"]))
def test_the_first_choice_goes_while_others_wait(mode: str, separate: dict) -> None:
    with running(sections(mode, max_prefill_tokens=8)) as cluster:
        client = cluster.client
        parent, *others = ask(client, LONG)
        until_held(cluster, 4)
        client.repeat(others[0])
        client.abort(others[3])
        until_held(cluster, 3)
        client.abort(parent)
        same(client.wait(others[:3]), separate[LONG][1:4])
        cluster.wait_idle()
        assert client.answers[parent].num_finals == 0
        assert client.answers[others[3]].tokens == []
        same(client.wait(others[:3]), separate[LONG][1:4])


def test_the_router_goes_while_choices_wait(separate: dict) -> None:
    config = sections("never", max_prefill_tokens=8)
    config["ping"] = {"interval_s": 0.25, "max_misses": 8}
    with running(config) as cluster:
        other = Client(cluster.members, "other/1")
        ask(other, LONG)
        until_held(cluster, 4)
        other.close()
        cluster.wait_idle()
        check_choices(cluster, separate)


def test_a_first_choice_that_is_not_there(separate: dict) -> None:
    prompt, (first, *others), expected = SHORT, choices(), separate[SHORT]
    with running(sections("always")) as cluster:
        client = cluster.client
        refused = client.submit(prompt, msgspec.structs.replace(first, grammar="no grammar"))
        sent = [client.submit(prompt, each, after=refused) for each in others]
        same(client.wait(sent), expected[1:])
        assert client.wait([refused])[0].error is not None
        parent = client.submit(prompt, first)
        same(client.wait([parent]), expected[:1])
        sent = [client.submit(prompt, each, after=parent) for each in others]
        same(client.wait(sent), expected[1:])
        assert {client.answers[each].num_cached_tokens for each in sent} == {whole_pages(prompt)}
        sent = [client.submit(prompt, each, after="nobody") for each in others]
        same(client.wait(sent), expected[1:])
