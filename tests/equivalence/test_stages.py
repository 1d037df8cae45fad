"""Where the time before the first token went: each stage is told, once, and they add up."""

import msgspec
import pytest

from tests.support.engines import Answer, running
from tests.support.laws import sections
from tests.support.prompts import problem_ids
from worker.api import Sampling, Stages


def ask(
    mode: str, num_prefill: int = 1, first_token: str = "prefill", num: int = 12, **engine: object
) -> list[list[Answer]]:
    """The same prompts twice: computed, then found in the prefix trees."""
    config = sections(mode, first_token=first_token, **engine)
    with running(config, num_prefill=num_prefill) as cluster:
        wanted = Sampling(12, temperature=0)
        return [cluster.client.generate(problem_ids(num), wanted) for _ in range(2)]


def durations(stages: Stages) -> tuple[float, ...]:
    """Of all five stages."""
    return msgspec.structs.astuple(stages)[:5]


def check(answers: list[Answer]) -> list[Stages]:
    for answer in answers:
        assert len(answer.stages) == 1, "once a request, with its first token"
        parts = durations(answer.stages[0])
        assert min(parts) >= 0
        assert 0 < sum(parts) <= answer.first_at - answer.sent_at
    return [answer.stages[0] for answer in answers]


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
def test_a_prompt_from_a_prefill_worker(first_token: str) -> None:
    """A token that is drawn there does not wait for what comes after it."""
    computed, cached = ask("always", first_token=first_token)
    for stages in check(computed):
        assert stages.prefilled_by == "prefill-0/i0"
        assert stages.prefill_s > 0
        later = [stages.transfer_s, stages.first_step_s]
        if first_token == "prefill":
            assert later == [0, 0]
            assert stages.decode_queue_s == 0
        else:
            assert min(later) > 0
    for answer, stages in zip(cached, check(cached), strict=True):
        if not stages.prefilled_by:  # all but the last token's page is here
            assert stages.prefill_s == stages.transfer_s == 0
        assert answer.num_cached_tokens > 0


def test_a_prompt_of_ones_own() -> None:
    computed, _ = ask("never", num_prefill=0)
    for stages in check(computed):
        assert stages.prefilled_by == "decode-0/i0"
        assert stages.prefill_s > 0
        assert stages.transfer_s == stages.decode_queue_s == stages.first_step_s == 0


@pytest.mark.parametrize(
    ("mode", "first_token"), [("always", "decode"), ("always", "prefill"), ("never", "decode")]
)
def test_waiting_for_a_row_counts_as_queue(mode: str, first_token: str) -> None:
    """With two rows for 24 requests most time is spent waiting, 70 to 97 % on a quiet machine."""
    num_prefill = 1 if mode == "always" else 0
    computed, _ = ask(mode, num_prefill, first_token, num=24, max_num_reqs=2)
    found = check(computed)
    queued = sum(stages.prefill_queue_s + stages.decode_queue_s for stages in found)
    assert queued > 0.25 * sum(sum(durations(stages)) for stages in found)
