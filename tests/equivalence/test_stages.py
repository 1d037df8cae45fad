"""Where the time before the first token went: each stage is told, once, and they add up."""

import msgspec
import pytest

from tests.support.engines import Answer, running
from tests.support.laws import sections
from tests.support.prompts import problem_ids
from worker.api import Sampling, Stages

PREFILL, DECODE = "prefill", "decode"


def ask(
    mode: str, num_prefill: int = 1, first_token: str = "prefill", num: int = 12, **engine: object
) -> list[list[Answer]]:
    """The same prompts twice: computed, then found in the prefix trees."""
    config = sections(mode, first_token=first_token, **engine)
    with running(config, num_prefill=num_prefill) as cluster:
        wanted = Sampling(12, temperature=0)
        return [cluster.client.generate(problem_ids(num), wanted) for _ in range(2)]


def durations(stages: Stages) -> tuple[float, ...]:
    return msgspec.structs.astuple(stages)[:5]


def check(answers: list[Answer]) -> list[Stages]:
    """The last of each request; those of an early first token come again, whole, with the next."""
    for answer in answers:
        first, *whole = answer.stages
        assert min(durations(first)) >= 0
        assert 0 < sum(durations(first)) <= answer.first_at - answer.sent_at
        assert not first.late
        for stages in whole:
            assert stages.late
            assert durations(stages)[:2] == durations(first)[:2]
            assert durations(first)[2:] == (0, 0, 0)
            assert not first.pulled_bytes
            assert min(durations(stages)) >= 0
            assert sum(durations(stages)) <= answer.end_at - answer.sent_at
        assert len(whole) <= 1
        check_pulls(answer, answer.stages[-1])
    return [answer.stages[-1] for answer in answers]


def check_pulls(answer: Answer, stages: Stages) -> None:
    """Of a prompt that was computed elsewhere, how much was pulled in which time: never 0."""
    pulled = stages.prefilled_by.startswith(PREFILL)
    assert pulled == (stages.pulled_bytes > 0) == (stages.pull_s > 0)
    assert stages.pull_s <= stages.pull_span_s <= answer.end_at - answer.sent_at
    assert stages.transfer_s <= stages.pull_span_s or not pulled


@pytest.mark.parametrize(("where", "drawn"), [(PREFILL, PREFILL), (PREFILL, DECODE), (DECODE,) * 2])
def test_a_prompt(where: str, drawn: str) -> None:
    """A token that is drawn where its prompt is computed does not wait for what comes after it. But
    who is pulled is told so: its transfer is never 0."""
    mode = "always" if where is PREFILL else "never"
    computed, cached = ask(mode, int(where is PREFILL), drawn)
    for stages in check(computed):
        assert stages.prefilled_by == f"{where}-0/i0"
        assert stages.prefill_s > 0
        later = [stages.transfer_s, stages.first_step_s]
        assert stages.late == (where == drawn == PREFILL)
        if where == drawn == DECODE:
            assert [*later, stages.decode_queue_s] == [0] * 3
        else:
            assert min(later) > 0
    for answer, stages in zip(cached, check(cached), strict=True):
        if not stages.prefilled_by:  # all but the last token's page is here
            assert stages.prefill_s == stages.transfer_s == 0
        assert answer.num_cached_tokens > 0
