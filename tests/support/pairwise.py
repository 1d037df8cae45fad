"""A few cases of a product of factors that hold every pair of values of any two of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

whole = False  # pytest --whole; set by tests/conftest.py before test files are imported
TRIES = 40
Case = tuple[Any, ...]  # one value of each factor
Pair = tuple[int, int, int, int]  # (factor, number of its value, another factor, of its value)


def every(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """The whole product."""
    return list(itertools.product(*factors.values()))


def more(*values: Any) -> tuple[Any, ...]:
    """Further values of a factor, with `--whole` alone."""
    return values if whole else ()


def in_whole(*cases: Case) -> list[Any]:
    """Further arguments for `parametrize`, of cases that are run with `--whole` alone."""
    return [pytest.param(*case, marks=pytest.mark.whole) for case in cases]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases that hold every pair, few of them; the same ones each time.

    Each begins with a pair that no case before it holds. The other factors get, one after another
    in an order by chance, the value that makes the most new pairs with those that are chosen. Of
    TRIES lists the shortest is taken; after Cohen et al., "The AETG system" (1997).
    """
    values = list(factors.values())
    found = [_cases([len(each) for each in values], random.Random(seed)) for seed in range(TRIES)]
    shortest = min(found, key=len)
    return [tuple(values[k][case[k]] for k in range(len(values))) for case in shortest]


def _cases(sizes: Sequence[int], rng: random.Random) -> list[dict[int, int]]:
    """Factor -> number of its value."""
    missing = _pairs(map(range, sizes))
    cases: list[dict[int, int]] = []
    while missing:
        i, a, j, b = min(missing)
        chosen = {i: a, j: b}
        for k in rng.sample(range(len(sizes)), len(sizes)):
            if k not in chosen:
                new = [
                    sum(_pair(k, c, other, at) in missing for other, at in chosen.items())
                    for c in range(sizes[k])
                ]
                chosen[k] = new.index(max(new))
        missing -= _of(chosen)
        cases.append(chosen)
    return cases


def _pair(i: int, a: int, j: int, b: int) -> Pair:
    return (i, a, j, b) if i < j else (j, b, i, a)


def _of(chosen: Mapping[int, int]) -> set[Pair]:
    """The pairs of a case, or of a part of one."""
    return {(i, chosen[i], j, chosen[j]) for i, j in itertools.combinations(sorted(chosen), 2)}


def _pairs(numbers: Iterable[Sequence[int]]) -> set[Pair]:
    both = itertools.combinations(enumerate(numbers), 2)
    return {(i, a, j, b) for (i, left), (j, right) in both for a in left for b in right}
