"""Start times of open loops: their rates, their laws, their errors."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng

from benchmarks.load.arrivals import starts

NUM = 20_000
SPECS = ("constant:10", "poisson:10", "gamma:10,0.25", "gamma:10,4")
ALPHA = 1e-4  # seeds are fixed, so a test that passes once passes always


def has_law(times: list[float], rate: float, shape: float = 1.0) -> bool:
    """Whether gaps have the gamma law of mean 1/rate and none depends on the one before."""
    from scipy import stats  # two seconds, where these tests run only

    gaps = np.diff([0.0, *times])
    law = stats.kstest(gaps, stats.gamma(shape, scale=1 / (shape * rate)).cdf).pvalue
    chain = stats.spearmanr(gaps[:-1], gaps[1:]).pvalue
    return bool(law > ALPHA and chain > ALPHA)


def rate_is(times: list[float], rate: float, variance: float = 1.0) -> bool:
    """Whether the mean gap is 1/rate within its own error; `variance` of a gap of mean 1."""
    mean = times[-1] / len(times) * rate
    return abs(mean - 1) < 4 * math.sqrt(variance / len(times))


@pytest.mark.parametrize(
    ("spec", "rate", "shape"),
    [
        *(("poisson:0.5", 0.5, 1.0), ("poisson:10", 10.0, 1.0), ("poisson:2000", 2000.0, 1.0)),
        *((f"gamma:10,{shape}", 10.0, shape) for shape in (0.25, 2.0, 10.0)),
    ],
)
def test_times_have_the_asked_rate_law_and_burstiness(spec: str, rate: float, shape: float) -> None:
    times = starts(spec, default_rng(1), NUM)
    assert rate_is(times, rate, 1 / shape)
    assert has_law(times, rate, shape)


def test_the_judges_see_wrong_processes() -> None:
    rng, asked = default_rng(3), 10.0
    slightly_fast = np.cumsum(rng.exponential(1 / 10.5, NUM)).tolist()
    assert not rate_is(slightly_fast, asked)
    uniform_gaps = np.cumsum(rng.uniform(0, 0.2, NUM)).tolist()
    assert rate_is(uniform_gaps, asked)  # the rate alone does not tell
    assert not has_law(uniform_gaps, asked)
    alternating = rng.exponential(0.1, NUM)
    alternating.reshape(-1, 2).sort()  # each long gap after a short one
    assert not has_law(np.cumsum(alternating).tolist(), asked)


@given(st.sampled_from(SPECS), st.integers(0, 2**32), st.integers(0, 3000), st.floats(0, 300))
def test_times_grow_from_zero_and_keep_both_bounds(spec, seed, num, duration_s) -> None:
    times = starts(spec, default_rng(seed), num, duration_s)
    assert times == sorted(times)
    assert len(times) <= num
    assert all(0 <= at_s < duration_s for at_s in times)
    assert times == starts(spec, default_rng(seed), num, duration_s)
    assert starts(spec, default_rng(seed), num // 2, duration_s) == times[: num // 2]
    early = [at_s for at_s in times if at_s < duration_s / 2]
    assert starts(spec, default_rng(seed), num, duration_s / 2) == early, "the beginning of more"
