"""Random delays on the compute stream change no output, though the host runs ahead of the device.

A delay is a kernel that spins on the stream, before or after a step, its tail, or the copies of its
rows. What the host writes meanwhile and a replay in flight still reads: the pinned rows of a decode
step; and the other way round, the pinned results. The mutants write into each of them early: the
host does where the device is late, and the device where it is not and the host is.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from tests.support import delay_mix
from tests.support.delay_mix import Delays, differing, leaving, sections
from tests.support.engines import Answer, value
from tests.support.lockstep import DECODE, Ask, Lockstep

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu(1)

LONG_S = 0.002
LONGER_S = 0.01  # so that the host is surely ahead when it spoils a buffer


def mix() -> list[Ask]:
    """All of them: on a GPU they take no time."""
    return delay_mix.mix(entire=True)


def workers(**how: Any) -> Lockstep:
    num_prefill = how.pop("num_prefill", 0)
    mode, num_groups = "always" if num_prefill else "never", how.pop("num_groups", 1)
    config = sections("cuda", mode, num_groups, **how.pop("engine", {}))
    return Lockstep(config, num_prefill=num_prefill, **how)


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[Lockstep, dict[str, list[Answer]]]]:
    """One worker without a prefix tree that grows, and its answers without delays."""
    made = workers(engine={"prefix_cache": False})
    answers = {each.__name__: made.serve(each()) for each in (mix, leaving)}
    assert value(made.engines[DECODE].metrics.preemptions) > 5
    yield made, answers
    made.close()


def test_delays_messages_and_pulls_change_no_token(plain) -> None:
    """Pulls write by themselves, behind no stream."""
    made = workers(num_prefill=1, num_groups=2, schedule=2)
    delays = Delays(made, 2, LONG_S)
    for each in (mix, leaving):
        assert not differing(each(), made.serve(each()), plain[1][each.__name__], exact=False)
    assert value(made.engines[DECODE].metrics.pulled_bytes("mooncake/tcp")) > 0
    assert delays.num_on_device > 100
    made.close()


def early_rows(runner: Any) -> None:
    """One pinned buffer a length: the rows of step n + 1 overwrite those of step n."""
    pinned: dict[tuple[int, ...], Any] = {}
    graphs = runner.graphs.decode
    launch, pin_memory = graphs.launch, torch.Tensor.pin_memory

    def pin(host: Any) -> Any:
        if host.shape not in pinned:
            pinned[host.shape] = pin_memory(host)
        return pinned[host.shape].copy_(host)

    def wrong(*args: Any) -> Any:
        with mock.patch.object(torch.Tensor, "pin_memory", pin):
            return launch(*args)

    graphs.launch = wrong


def early_results(runner: Any) -> None:
    """One pinned buffer a length: the tokens of step n + 1 overwrite those of step n."""
    from worker.draw.sampler import Result

    pinned: dict[tuple[int, ...], Any] = {}
    run = runner.run

    def wrong(*args: Any) -> Any:
        outcome = run(*args)
        result = outcome.result
        if result is None or result.scores is not None:
            return outcome
        drawn = result.drawn
        if drawn.shape not in pinned:
            pinned[drawn.shape] = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)

        class Early(Result):
            def to_host(self) -> Result:
                return Result(pinned[drawn.shape].copy_(drawn, non_blocking=True))

        return outcome._replace(result=Early(drawn))

    runner.run = wrong


@pytest.mark.parametrize(("spoil", "share"), [(early_rows, 1.0), (early_results, 0.0)])
def test_the_same_check_fails_when_a_buffer_is_written_early(spoil, share, plain) -> None:
    made = workers()
    spoil(made.engines[DECODE].runner)
    Delays(made, 3, LONGER_S, share=share)
    try:
        found = made.serve(mix())
    except AssertionError:
        found = None  # the host's and the device's idea of a row differ: it noticed by itself
    torch.cuda.synchronize()
    made.close()
    assert found is None or differing(mix(), found, plain[1]["mix"], exact=False)


def test_delays_change_not_a_bit(plain: tuple[Lockstep, dict[str, list[Answer]]]) -> None:
    """The same batches each time. The last of this file: `plain` is delayed from now on."""
    made, answers = plain
    delays = Delays(made, 1, LONG_S)
    for _ in range(2):
        assert not differing(mix(), made.serve(mix()), answers["mix"], exact=True)
    assert delays.num_on_device > 200
