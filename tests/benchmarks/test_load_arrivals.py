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


def looks_poisson(times: list[float], rate: float) -> bool:
    """Whether gaps have the exponential law of mean 1/rate and none depends on the one before."""
    from scipy import stats  # two seconds, where these tests run only

    gaps = np.diff([0.0, *times])
    law = stats.kstest(gaps * rate, "expon").pvalue
    chain = stats.spearmanr(gaps[:-1], gaps[1:]).pvalue
    return bool(law > ALPHA and chain > ALPHA)


def rate_is(times: list[float], rate: float, num_sigma: float = 4.0, variance: float = 1.0) -> bool:
    """Whether the mean gap is 1/rate within its own error; `variance` of a gap of mean 1."""
    mean = times[-1] / len(times) * rate
    return abs(mean - 1) < num_sigma * math.sqrt(variance / len(times))


@pytest.mark.parametrize(("seed", "rate"), [(0, 0.5), (1, 10.0), (2, 10.0), (3, 2000.0)])
def test_poisson_has_its_rate_and_its_law(seed: int, rate: float) -> None:
    times = starts(f"poisson:{rate}", default_rng(seed), NUM)
    assert rate_is(times, rate)
    assert looks_poisson(times, rate)


def test_the_judges_see_wrong_processes() -> None:
    rng = default_rng(3)
    asked = 10.0
    too_fast = np.cumsum(rng.exponential(1 / 16, NUM)).tolist()  # asked 10/s, sent 16/s
    assert not rate_is(too_fast, asked)
    assert not looks_poisson(too_fast, asked)
    slightly_fast = np.cumsum(rng.exponential(1 / 10.5, NUM)).tolist()
    assert not rate_is(slightly_fast, asked)
    even = starts("constant:10", rng, NUM)
    assert not looks_poisson(even, asked)
    uniform_gaps = np.cumsum(rng.uniform(0, 0.2, NUM)).tolist()
    assert rate_is(uniform_gaps, asked)  # the rate alone does not tell
    assert not looks_poisson(uniform_gaps, asked)
    alternating = rng.exponential(0.1, NUM)
    alternating.reshape(-1, 2).sort()  # each long gap after a short one
    assert not looks_poisson(np.cumsum(alternating).tolist(), asked)


@pytest.mark.parametrize("shape", [0.25, 0.5, 2.0, 10.0])
def test_gamma_keeps_the_rate_and_has_the_asked_burstiness(shape: float) -> None:
    from scipy import stats

    times = starts(f"gamma:10,{shape}", default_rng(1), NUM)
    gaps = np.diff([0.0, *times])
    assert rate_is(times, 10, variance=1 / shape)
    assert stats.kstest(gaps, stats.gamma(shape, scale=1 / (shape * 10)).cdf).pvalue > ALPHA
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)


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
