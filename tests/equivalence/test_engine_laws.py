"""The same request gives the same ids, whatever serves it.

The oracle is one request at a time in one process, which test_api_laws.py compares with
`transformers`. All in float32, where the laws hold exactly.
"""

import random

import pytest

from tests.support import pairwise
from tests.support.engines import Client, Running, running, value
from tests.support.laws import ids, one_that_stops, sections
from tests.support.prompts import problem_ids
from worker.api import FinishReason, Sampling, TokenChunk

NUM, NUM_TOKENS = (16, 48) if pairwise.whole else (4, 16)
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0)


def seeded(num: int) -> list[Sampling]:
    """Every filter on, other values and another seed for each request."""
    rng = random.Random(5)
    return [
        Sampling(
            max_tokens=NUM_TOKENS - 4,
            temperature=rng.choice([0.5, 0.9, 1.3]),
            top_p=rng.choice([1.0, 0.9, 0.7]),
            top_k=rng.choice([0, 5, 40]),
            min_p=rng.choice([0.0, 0.02]),
            seed=rng.getrandbits(62),
            ignore_eos=rng.random() < 0.3,
            min_tokens=rng.choice([0, 10]),
        )
        for _ in range(num)
    ]


def asked() -> tuple[list[tuple[int, ...]], list[Sampling]]:
    """Prompts and samplings: each prompt greedy and seeded."""
    return [*problem_ids(NUM)] * 2, [GREEDY] * NUM + seeded(NUM)


@pytest.fixture(scope="module")
def expected(alone: Running) -> list[list[int]]:
    return [
        ids(alone.client.generate([each[0]], each[1]))[0] for each in zip(*asked(), strict=True)
    ]


def decode_engine(pages: str, page_size: int) -> dict[str, object]:
    """What is different for decode workers: another pool, or one that is too small for all."""
    if pages == "few":
        longest = max(len(prompt) for prompt in problem_ids(NUM)) + NUM_TOKENS + 2
        return {"num_pages": 3 * -(-longest // page_size), "growth_tokens": 1}
    return {"num_pages": 12_432 // page_size} if pages == "other" else {}


@pytest.mark.product(
    place=("always", "auto", "never"),
    page_size=(16, 1, 64),
    max_prefill_tokens=(None, 23),
    num_groups=(1, 2),
    pages=("same", "other", "few"),
    transport=("shm/shm", "mooncake/tcp"),
    num_each=(1, 2),
    first_token=("prefill", "decode"),
)
def test_whatever_serves_a_request_changes_nothing(
    place, page_size, max_prefill_tokens, num_groups, pages, transport, num_each, first_token,
    expected,
) -> None:  # fmt: skip
    """Where prompts are computed, in what chunks; how many workers there are, and with what pages.

    With another number of pages, layer groups begin elsewhere than at the source.
    """
    chunks = {} if max_prefill_tokens is None else {"max_prefill_tokens": max_prefill_tokens}
    config = sections(place, page_size, first_token, **chunks)
    config["kv"]["num_groups"] = num_groups
    config["transport"] = dict(zip(("name", "kind"), transport.split("/"), strict=True))
    other = {"engine": decode_engine(pages, page_size)}
    with running(
        config, num_prefill=num_each, num_decode=num_each, decode_sections=other
    ) as cluster:
        prefills, decodes = (
            [each.engine for name, each in cluster.workers.items() if name.startswith(role)]
            for role in ("prefill", "decode")
        )
        # Cold, then with whatever the prefix trees kept; on a busy machine rows rarely meet.
        for number in range(60):
            assert ids(cluster.client.generate(*asked())) == expected
            preempted = sum(value(each.metrics.preemptions) for each in decodes)
            if number and (pages != "few" or preempted > 0):
                break
    sizes = [{each.pool.num_pages for each in engines} for engines in (prefills, decodes)]
    assert (sizes[0] == sizes[1]) == (pages == "same")
    if place == "always":
        assert all(value(each.metrics.prompt_tokens) > 0 for each in prefills)
        draw = [value(each.metrics.generated_tokens) > 0 for each in prefills]
        assert draw == [first_token == "prefill"] * num_each
    if pages == "few":
        assert preempted > 0, "the pool was not small enough to show anything"


def test_a_prefix_that_decode_holds_is_not_transferred() -> None:
    prompt = problem_ids(1)[0]
    with running(sections()) as cluster:
        pulled = cluster.workers["decode-0"].engine.metrics.pulled_bytes("shm/shm")
        first = cluster.client.generate([prompt], GREEDY)[0]
        cold = value(pulled)
        again = cluster.client.generate([[*prompt, *first.tokens, *prompt]], GREEDY)[0]
        page_bytes = cluster.workers["decode-0"].engine.layout.page_bytes
        num_known = (len(prompt) + len(first.tokens) - 1) // 16
        num_all = -(-(2 * len(prompt) + len(first.tokens)) // 16)
        assert cold == -(-len(prompt) // 16) * page_bytes
        assert value(pulled) - cold == (num_all - num_known) * page_bytes
        assert again.num_cached_tokens == num_known * 16


@pytest.mark.parametrize("mode", pairwise.one_in(2, ["always", "never"]))
def test_a_second_turn_finds_what_was_computed_and_no_more(mode: str, alone: Running) -> None:
    """The last token of an answer has been drawn, and no step has computed its KV. Answers of
    every length modulo the page, so that this token is the last one of a page, too."""
    page_size = 4
    first = problem_ids(1)[0]
    with running(sections(mode, page_size)) as cluster:
        for num in range(1, page_size + 1):
            prompt = [*first, num]  # nothing but `first` is shared with other rounds
            known = Sampling(max_tokens=page_size + num, temperature=0.0, ignore_eos=True)
            (answer,) = cluster.client.generate([prompt], known)
            said = [*prompt, *answer.tokens]
            turn = [*said, *prompt[:3]]
            (after,) = cluster.client.generate([turn], GREEDY)
            assert after.num_cached_tokens == (len(said) - 1) // page_size * page_size
            assert ids([after]) == ids(alone.client.generate([turn], GREEDY))


def test_finish_reasons_and_limits(alone: Running) -> None:
    prompt, full = one_that_stops(alone.client)
    cut = alone.client.generate([prompt], Sampling(max_tokens=5, temperature=0.0))[0]
    assert (cut.tokens, cut.finish_reason) == (full.tokens[:5], FinishReason.LENGTH)
    stop = Sampling(max_tokens=300, temperature=0.0, stop_ids=(full.tokens[7],))
    stopped = alone.client.generate([prompt], stop)[0]
    first = full.tokens.index(full.tokens[7])
    assert stopped.tokens == full.tokens[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP
    beyond = Sampling(max_tokens=len(full.tokens) + 9, temperature=0.0, ignore_eos=True)
    longer = alone.client.generate([prompt], beyond)[0]
    assert longer.tokens[: len(full.tokens)] == full.tokens
    assert (len(longer.tokens), longer.finish_reason) == (beyond.max_tokens, FinishReason.LENGTH)
    late = Sampling(max_tokens=300, temperature=0.0, min_tokens=len(full.tokens) + 3)
    assert len(alone.client.generate([prompt], late)[0].tokens) > len(full.tokens) + 3
    alone.wait_idle()


@pytest.mark.parametrize("mode", ["always", "never"])
def test_abort_at_any_moment_gives_everything_back(mode: str) -> None:
    rng = random.Random(11)
    with running(sections(mode, max_prefill_tokens=40)) as cluster:
        client = cluster.client
        sampling = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
        for _ in range(4):
            sent = [client.submit(prompt, sampling) for prompt in problem_ids(16)]
            rng.shuffle(sent)
            for req_id in sent:
                client.pump(rng.choice([0.001, 0.003, 0.02]))
                client.abort(req_id)
        cluster.wait_idle()
        assert len(client.generate([problem_ids(1)[0]], GREEDY)[0].tokens) > 0


@pytest.mark.parametrize("mode", pairwise.one_in(2, ["always", "never"]))
def test_a_router_is_told_who_has_a_row(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step that it is in; who waits for a row is told of by nothing."""
    told: list[tuple[str, bool]] = []  # of each chunk: whose, and whether it has tokens
    take = Client._take

    def noted(client: Client, peer: str, chunk: TokenChunk) -> None:
        told.append((chunk.req_id, bool(chunk.tokens)))
        take(client, peer, chunk)

    monkeypatch.setattr(Client, "_take", noted)
    with running(sections(mode, first_token="decode", max_num_reqs=1)) as cluster:
        first, second = (cluster.client.submit(prompt, GREEDY) for prompt in problem_ids(2))
        cluster.client.wait([first, second])
    of_each = {each: [has for req_id, has in told if req_id == each] for each in (first, second)}
    assert [has[:2] for has in of_each.values()] == [[False, True]] * 2
    assert told.index((second, False)) > max(i for i, each in enumerate(told) if each[0] == first)
