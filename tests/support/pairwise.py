"""A few cases of a product of factors that hold every pair of values of any two of them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from allpairspy import AllPairs

whole = False  # pytest --whole; set by tests/conftest.py before test files are imported
Case = tuple[Any, ...]  # one value of each factor


def every(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    return list(itertools.product(*factors.values()))


def more(*values: Any) -> tuple[Any, ...]:
    """Further values of a factor, with `--whole` alone."""
    return values if whole else ()


def in_whole(*cases: Case) -> list[Any]:
    """Further arguments for `parametrize`, of cases that are run with `--whole` alone."""
    return [pytest.param(*case, marks=pytest.mark.whole) for case in cases]


def halved(values: Iterable[Any]) -> list[Any]:
    """Arguments for `parametrize`: every other one, and the rest with `--whole` alone."""
    found = list(values)
    return [*found[::2], *in_whole(*((value,) for value in found[1::2]))]


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
