"""Products that are run in part: the part holds every pair of values, or every value."""

import itertools
import random

import pytest

from tests.support.pairwise import each_value, every, pairwise


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_is_in_some_case(seed: int) -> None:
    rng = random.Random(seed)
    factors = {f"factor {i}": range(rng.randint(1, 5)) for i in range(rng.randint(1, 6))}
    cases = pairwise(factors)

    def pairs(product: list[tuple[int, ...]]) -> set[object]:
        both = (itertools.combinations(enumerate(case), 2) for case in product)
        return set(itertools.chain.from_iterable(both))

    assert pairs(cases) == pairs(every(factors))
    assert set(cases) <= set(every(factors))
    assert cases == pairwise(factors)
    few = each_value(factors)
    assert set(few) <= set(every(factors))
    assert len(few) == max(map(len, factors.values()))
    held = [set(values) for values in zip(*few, strict=True)]
    assert held == [set(values) for values in factors.values()]
    assert few == each_value(factors)
