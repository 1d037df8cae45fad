"""What `tests.fault.growth` takes for growth."""

import math

from tests.fault.growth import FEW, rises


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
