"""What `tests.fault.growth` takes for growth."""

import math
import os
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, mmap

import pytest

from tests.fault.growth import FEW, MIB, rises, sizes_of

LEAK = 4 * MIB  # a sample: of a process of tests, which has a gigabyte by then, more than a share


def test_what_rises_in_the_second_half_grows_and_what_has_filled_up_does_not() -> None:
    noise = [math.sin(7 * i) for i in range(120)]
    samples = [
        (
            15.0 * i,
            {
                "leak MiB": 200 + 0.2 * i + noise[i],
                "pool MiB": min(300, 100 + 5 * i) + noise[i],
                "files": 40 + i // 30,
                "threads": 40 + 2 * (noise[i] > 0.9),
                **({"restarted MiB": 100.0} if i > 80 else {}),
            },
        )
        for i in range(120)
    ]
    found = rises(samples)
    assert {name for name, rise in found.items() if rise.is_growth} == {"leak MiB"}
    assert found["leak MiB"].by > 10
    assert 1 < found["files"].by <= FEW, "one more file is none"
    assert "restarted MiB" not in found


@pytest.mark.parametrize("leak", ["private", "mapped", ""])
def test_a_pool_that_fills_does_not_grow_and_a_leak_of_either_memory_does(leak: str) -> None:
    pool, leaked, samples = mmap(-1, 80 * MIB), list[mmap](), []
    kinds = {"private": MAP_PRIVATE, "mapped": MAP_SHARED}
    for i in range(40):
        pool[2 * i * MIB : 2 * (i + 1) * MIB] = b"x" * 2 * MIB
        if leak:
            leaked.append(mmap(-1, LEAK, MAP_ANONYMOUS | kinds[leak]))
            leaked[-1].write(b"x" * LEAK)
        samples.append((float(i), sizes_of("it", os.getpid())))
    grows = {name for name, rise in rises(samples).items() if rise.is_growth}
    assert grows == ({f"it {leak} MiB"} if leak else set[str]())
