"""The first token drawn where the prompt ends, or where it goes on: nobody can tell which.

The oracle is one request at a time in one process. All in float32, where the laws hold exactly.
"""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import msgspec
import pytest
from torch import Tensor

from tests.support.books import check_book
from tests.support.engines import Answer, Running, running, value
from tests.support.laws import ended, one_that_stops, sections
from tests.support.pairwise import more, one_in
from tests.support.prompts import problem_ids
from worker.api import FinishReason, Sampling
from worker.errors import Busy, PeerLost, Revoked, TransferError, TransferTimeout
from worker.plan import RowStart
from worker.run import chunks
from worker.schedule import prefill as prefill_schedule
from worker.step.rows import SampledRows

NUM, PAGE_SIZE, EOS = 10, 16, 2
GREEDY = Sampling(14, temperature=0.0)
Outcomes = list[tuple[list[int], FinishReason | None]]
WORKERS = ("prefill", "decode")  # that draw it
CAUSES = [each.code for each in (Revoked, PeerLost, Busy, TransferError, TransferTimeout)]


def outcomes(answers: Sequence[Answer]) -> Outcomes:
    assert all(len(each.stages) == 1 + each.stages[-1].late for each in ended(answers))
    return [(answer.tokens, answer.finish_reason) for answer in answers]


@pytest.fixture(scope="module")
def firsts(alone: Running) -> list[int]:
    answers = alone.client.generate(problem_ids(NUM), GREEDY)
    return [answer.tokens[0] for answer in answers]


def kinds(first: int) -> list[Sampling]:
    """Every way in which a first token is drawn, or ends its request; `first` is the greedy one."""
    return [
        GREEDY,
        Sampling(12, temperature=0.9, seed=5),
        Sampling(12, temperature=1.3, top_p=0.8, top_k=30, min_p=0.01, seed=(1 << 62) + 9),
        Sampling(1, temperature=0.0),
        Sampling(1, temperature=1.1, seed=77),
        msgspec.structs.replace(GREEDY, stop_ids=(first,)),
        msgspec.structs.replace(GREEDY, stop_ids=(first,), max_tokens=1),
        msgspec.structs.replace(GREEDY, stop_ids=(first,), min_tokens=1),
        msgspec.structs.replace(GREEDY, stop_ids=(first, EOS), min_tokens=6, ignore_eos=True),
        Sampling(12, temperature=0.8, seed=3, stop_ids=(first,), min_tokens=12),
    ]


OTHERS = [
    msgspec.structs.replace(GREEDY, logprobs=2),
    msgspec.structs.replace(GREEDY, repetition_penalty=1.2),
    msgspec.structs.replace(GREEDY, logit_bias=((40, 2.0),)),
]
Asked = tuple[tuple[int, ...], Sampling, int]  # text, sampling, tokens of it that are the prompt


def resumed(alone: Running) -> list[Asked]:
    """As after the death of a decode worker; in the first the next token is the end's."""
    prompt, whole = one_that_stops(alone.client)
    num = len(prompt)
    assert whole.tokens[-1] == EOS
    limit = Sampling(300, temperature=0.0)
    num_all = len(whole.tokens)
    late = Sampling(num_all + 20, temperature=0.0, min_tokens=num_all + 2)
    seeded = Sampling(num_all, temperature=0.9, seed=8, min_tokens=8)
    return [
        ((*prompt, *whole.tokens[:-1]), limit, num),
        ((*prompt, *whole.tokens[:-1]), late, num),
        ((*prompt, *whole.tokens[:-1]), seeded, num),  # the last one that it may have
        ((*prompt, *whole.tokens[:3]), seeded, num),
    ]


@pytest.fixture(scope="module")
def asked(alone: Running, firsts: list[int]) -> list[Asked]:
    prompts = problem_ids(NUM)
    new = [
        (prompt, sampling, len(prompt))
        for number, prompt in enumerate(prompts)
        for sampling in (kinds(firsts[number])[number], kinds(firsts[number])[(number + 5) % NUM])
    ]
    return [*new, *resumed(alone)]


def answers_of(cluster: Running, asked: Sequence[Asked]) -> list[Answer]:
    """All at once."""
    sent = [
        cluster.client.submit(tokens, sampling, num_prompt_tokens=num)
        for tokens, sampling, num in asked
    ]
    answers = cluster.client.wait(sent)
    cluster.wait_idle()
    return answers


@pytest.fixture(scope="module")
def expected(alone: Running, asked: list[Asked]) -> Outcomes:
    found = [outcomes(answers_of(alone, [each]))[0] for each in asked]
    lengths = [len(tokens) for tokens, _ in found]
    assert lengths.count(1) >= 6, "requests that end with their first token"
    ends = {reason for tokens, reason in found if len(tokens) == 1}
    assert {FinishReason.STOP, FinishReason.LENGTH} <= ends
    return found


def drawn(cluster: Running, role: str) -> float:
    """Tokens drawn by the workers of a role."""
    return sum(
        value(worker.engine.metrics.generated_tokens)
        for name, worker in cluster.workers.items()
        if name.startswith(role)
    )


def pulled(cluster: Running) -> float:
    return value(cluster.workers["decode-0"].engine.metrics.pulled_bytes("shm/shm"))


def num_observed(cluster: Running, name: str) -> float | None:
    """Of a histogram of the decode worker's."""
    labels = {"model": "tiny", "role": "decode", "worker": "decode-0", "transport": "shm/shm"}
    registry = cluster.workers["decode-0"].engine.metrics.registry
    return registry.get_sample_value(f"kvlane_{name}_seconds_count", labels)


@pytest.mark.product(first_token=WORKERS, max_prefill_tokens=(512, 23), num_groups=(1, 2))
def test_texts_reasons_and_counts_do_not_depend_on_it(
    first_token, max_prefill_tokens, num_groups, asked: list[Asked], expected: Outcomes
) -> None:
    """Cold, then with what the prefix trees kept."""
    config = sections("always", PAGE_SIZE, first_token, max_prefill_tokens=max_prefill_tokens)
    config["kv"]["num_groups"] = num_groups
    with running(config) as cluster:
        for _ in range(2):
            before = drawn(cluster, "prefill"), drawn(cluster, "decode")
            answers = answers_of(cluster, asked)
            assert outcomes(answers) == expected
            here, there = drawn(cluster, "prefill"), drawn(cluster, "decode")
            num_drawn = here - before[0], there - before[1]
            assert sum(num_drawn) == sum(len(tokens) for tokens, _ in expected)
            assert num_drawn[0] <= (len(asked) if first_token == "prefill" else 0)
            if before == (0, 0) and first_token == "prefill":
                assert num_drawn[0] == len(asked), "no prompt is in decode's tree"
        retries = cluster.workers["decode-0"].engine.metrics.fetch_retries
        assert not any(value(retries(cause)) for cause in CAUSES)
        counts = [num_observed(cluster, name) for name in ("kv_fetch", "kv_transfer")]
        assert counts[0] == counts[1] > 0, "a transfer is timed wherever the token is drawn"


def test_what_only_decode_can_draw_is_drawn_there(alone: Running) -> None:
    prompts = problem_ids(len(OTHERS))
    wanted = alone.client.generate(prompts, OTHERS)
    with running(sections("always")) as cluster:
        found = cluster.client.generate(prompts, OTHERS)
        assert outcomes(found) == outcomes(wanted)
        assert drawn(cluster, "prefill") == 0
        assert pulled(cluster) > 0
        assert [len(each.logprobs) for each in found] == [len(each.logprobs) for each in wanted]


@pytest.mark.parametrize("kind", ["stop id", *more("max_tokens", "end of text")])
def test_a_request_that_ends_with_it_holds_nothing(kind: str, alone: Running, firsts) -> None:
    """With one token to come nothing is pulled at all; else what was announced before it may be."""
    end_of_text = resumed(alone)[0]
    with running(sections("always", prefix_cache=False)) as cluster:
        for prompt, first in zip(problem_ids(NUM), firsts, strict=True):
            stops = msgspec.structs.replace(GREEDY, stop_ids=(first,))
            asked = {
                "max_tokens": (prompt, Sampling(1, temperature=0.0), len(prompt)),
                "stop id": (prompt, stops, len(prompt)),
                "end of text": end_of_text,
            }
            (answer,) = answers_of(cluster, [asked[kind]])
            assert len(answer.tokens) == 1
            reason = FinishReason.LENGTH if kind == "max_tokens" else FinishReason.STOP
            assert answer.finish_reason is reason
        assert drawn(cluster, "prefill") == NUM
        assert drawn(cluster, "decode") == 0
        # Of prompts in one step the token comes with the first announcement of pages.
        assert pulled(cluster) == 0
        counted = cluster.workers["decode-0"].engine.metrics.requests
        wanted = "length" if kind == "max_tokens" else "stop"
        assert value(counted(wanted)) == NUM
        assert value(counted("abort")) == 0
        for worker in cluster.workers.values():
            assert value(worker.engine.metrics.lease_expired) == 0


@pytest.mark.parametrize("first_token", one_in(2, WORKERS))
def test_a_full_context_ends_with_it(first_token: str, alone: Running) -> None:
    prompt = problem_ids(1)[0]
    config = sections("always", PAGE_SIZE, first_token)
    config["model"]["max_model_len"] = len(prompt) + 1
    only = Sampling(1, temperature=0.0)
    wanted = outcomes(alone.client.generate([prompt], only))
    with running(config) as cluster:
        assert outcomes(answers_of(cluster, [(prompt, only, len(prompt))])) == wanted


@pytest.mark.parametrize("num_tokens", [16, *more(2, 17, 18, 32, 33)])
def test_prompts_that_end_at_a_page_s_edge(num_tokens: int, alone: Running) -> None:
    """And what their beginnings leave in the trees: the same texts, the same cached tokens."""
    prompt = sum(problem_ids(3), ())[:num_tokens]
    wanted = outcomes(alone.client.generate([prompt, (*prompt, 9, 8)], GREEDY))
    found = []
    for first_token in WORKERS:
        with running(sections("always", PAGE_SIZE, first_token)) as cluster:
            answers = answers_of(cluster, [(prompt, GREEDY, num_tokens)])
            answers += answers_of(cluster, [(prompt, GREEDY, num_tokens)])
            answers += answers_of(cluster, [((*prompt, 9, 8), GREEDY, num_tokens + 2)])
            assert outcomes(answers) == [wanted[0], wanted[0], wanted[1]]
            found.append([answer.num_cached_tokens for answer in answers])
            for worker in cluster.workers.values():
                check_book(worker.engine.book, [])
    assert found[0] == found[1]


@pytest.mark.parametrize("first", one_in(2, ["ends with it", "goes on"]))
def test_choices_follow_a_first_one_whose_token_came_early(first: str, alone: Running) -> None:
    """They wait for the prompt's KV; if the first one ends without it, they bring it themselves."""
    prompt = next(each for each in problem_ids(9) if (len(each) - 1) % PAGE_SIZE > 2)
    samplings = [Sampling(16, temperature=1.1, seed=70 + number) for number in range(4)]
    if first == "ends with it":
        samplings[0] = Sampling(1, temperature=1.1, seed=70)
    wanted = outcomes(alone.client.generate([prompt] * 4, samplings))
    with running(sections("always")) as cluster:
        client = cluster.client
        sent = [client.submit(prompt, samplings[0])]
        sent += [client.submit(prompt, each, after=sent[0]) for each in samplings[1:]]
        assert outcomes(client.wait(sent)) == wanted
        cluster.wait_idle()
        computed = [value(each.engine.metrics.prompt_tokens) for each in cluster.workers.values()]
        assert sum(computed) == len(prompt) + 3 * ((len(prompt) - 1) % PAGE_SIZE + 1)


# What would show if it were wrong.


def one_later(rows: Tensor, position: Tensor, valid: Tensor) -> SampledRows:
    """The noise of the position after."""
    return SampledRows(rows, position + 1, valid)


def without_minimum(*args: Any, **kwargs: Any) -> RowStart:
    """A prefill worker that does not know of min_tokens."""
    return RowStart(*args, **{**kwargs, "min_len": 0})


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    one_in(
        2, [(chunks, "SampledRows", one_later), (prefill_schedule, "RowStart", without_minimum)]
    ),
)
def test_the_same_check_fails_when_it_is_drawn_otherwise(owner, name, wrong, asked, expected):
    with running(sections("always")) as cluster, mock.patch.object(owner, name, wrong):
        assert outcomes(answers_of(cluster, asked)) != expected
