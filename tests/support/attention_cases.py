"""Shapes that every attention backend has to serve, and a few of them that hold every pair."""

from tests.support.pairwise import every, pairwise

RATIOS = (1, 2, 4, 8)  # query heads for each kv head
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 64)
DTYPES = ("bfloat16", "float16")
GROUPS = (1, 4)  # of layers, in the pool's layout
FACTORS = {
    "ratio": RATIOS,
    "head_dim": HEAD_DIMS,
    "page_size": PAGE_SIZES,
    "dtype": DTYPES,
    "groups": GROUPS,
}
EVERY = every(FACTORS)
PAIRWISE = pairwise(FACTORS)
EACH = [(1, 64, 16, "float16", 4), (2, 256, 1, "bfloat16", 1), (4, 128, 64, "bfloat16", 4),
        (8, 64, 1, "float16", 1)]  # every value in some case  # fmt: skip
