"""Shapes that every attention backend has to serve, and a few of them that hold every pair."""

from __future__ import annotations

import itertools

RATIOS = (1, 2, 4, 8)  # query heads for each kv head
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 64)
DTYPES = ("bfloat16", "float16")
GROUPS = (1, 4)  # of layers, in the pool's layout
AXES = (RATIOS, HEAD_DIMS, PAGE_SIZES, DTYPES, GROUPS)

Case = tuple[int, int, int, str, int]  # one value of each axis
EVERY: list[Case] = list(itertools.product(*AXES))
PAIRWISE: list[Case] = [
    (1, 64, 1, "bfloat16", 4),
    (1, 128, 16, "float16", 1),
    (1, 256, 64, "bfloat16", 4),
    (2, 64, 16, "float16", 1),
    (2, 128, 64, "bfloat16", 4),
    (2, 256, 1, "float16", 1),
    (4, 64, 64, "float16", 1),
    (4, 128, 1, "float16", 1),
    (4, 256, 16, "bfloat16", 4),
    (8, 64, 1, "bfloat16", 1),
    (8, 128, 16, "bfloat16", 1),
    (8, 256, 64, "float16", 4),
]


def pairs(cases: list[Case]) -> set[tuple[int, object, int, object]]:
    """(axis, value, other axis, value) of all cases."""
    both = list(itertools.combinations(range(len(AXES)), 2))
    return {(i, case[i], j, case[j]) for case in cases for i, j in both}


assert pairs(PAIRWISE) == pairs(EVERY)
