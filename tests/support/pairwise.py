"""A few cases of a product of factors that hold every pair of values of any two of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

whole = False  # pytest --whole; set by tests/conftest.py before test files are imported
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
    """Cases that hold every pair, chosen one after the other; the same ones each time.

    Each case begins with a pair that no case before it holds. The other factors get, one after
    another, the value that makes the most new pairs with those that are chosen.
    """
    values = list(factors.values())
    missing = _pairs(range(len(each)) for each in values)
    cases = []
    while missing:
        i, a, j, b = min(missing)
        chosen = {i: a, j: b}
        for k in range(len(values)):
            if k not in chosen:
                chosen[k] = max(
                    range(len(values[k])),
                    key=lambda c, k=k: len(_of({**chosen, k: c}) & missing),
                )
        missing -= _of(chosen)
        cases.append(tuple(values[k][chosen[k]] for k in range(len(values))))
    return cases


def _of(chosen: Mapping[int, int]) -> set[Pair]:
    """The pairs of a case, or of a part of one."""
    return {(i, chosen[i], j, chosen[j]) for i, j in itertools.combinations(sorted(chosen), 2)}


def _pairs(numbers: Iterable[Sequence[int]]) -> set[Pair]:
    both = itertools.combinations(enumerate(numbers), 2)
    return {(i, a, j, b) for (i, left), (j, right) in both for a in left for b in right}
