"""A few cases of a product of factors that hold every pair of values, or every value."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs

whole = False  # pytest --whole; set by tests/conftest.py before test files are imported
Case = tuple[Any, ...]  # one value of each factor
PARAM = type(pytest.param())


def every(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    return list(itertools.product(*factors.values()))


def more(*values: Any) -> tuple[Any, ...]:
    """Further values of a factor, with `--whole` alone."""
    return values if whole else ()


def in_whole(*cases: Case) -> list[Any]:
    """Further arguments for `parametrize`, of cases that are run with `--whole` alone."""
    return [pytest.param(*case, marks=pytest.mark.whole) for case in cases]


def one_in(num: int, cases: Iterable[Any]) -> list[Any]:
    """Arguments for `parametrize`: one of so many, and the rest with `--whole` alone."""
    found = []
    for i, case in enumerate(cases):
        given, how = (case if isinstance(case, tuple) else (case,)), {}
        if isinstance(case, PARAM):
            given, how = case.values, {"id": case.id, "marks": case.marks}
        if i % num:
            how["marks"] = [*how.get("marks", ()), pytest.mark.whole]
        found.append(pytest.param(*given, **how))
    return found


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases that hold every pair, few of them; the same ones each time."""
    if len(factors) < 2:
        return every(factors)
    names = sorted(factors, key=lambda name: -len(factors[name]))  # so there are fewer cases
    cases = [
        dict(zip(names, case, strict=True))
        for case in AllPairs([list(factors[name]) for name in names])
    ]
    return [tuple(case[name] for name in factors) for case in cases]


def each_value(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """As many cases as the longest factor has values, that hold every value; always the same."""
    left = {(name, value) for name, values in factors.items() for value in values}
    rest, cases = every(factors), list[Case]()
    while left:
        best = max(rest, key=lambda case: len(left.intersection(zip(factors, case, strict=True))))
        left.difference_update(zip(factors, best, strict=True))
        cases.append(best)
    return cases
