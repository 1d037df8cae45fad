"""What eight bits would free of a GPU's memory: of weights, and of KV. Free of torch."""

from collections.abc import Iterator
from contextlib import suppress

from cluster.config import Config
from cluster.diagnose.facts import Driver
from cluster.diagnose.finding import Finding, ok
from worker.config import MEMORY_FRACTION
from worker.errors import UserError
from worker.start.check import EIGHT_BITS, ON_GPUS, sizes_of

ROW = 8192  # tokens of a row, in what is said


def eight_bits(config: Config, driver: Driver) -> Iterator[Finding]:
    """A finding if the model's files are here; on a GPU it says how many tokens of KV there are."""
    with suppress(UserError):  # another finding tells of it
        sizes = sizes_of(config.model.directory)
        figures: dict[str, float] = {x: n for x, n in sizes._asdict().items() if x != "form"}
        text = f"{sizes.told}; KV {sizes.kv_token:,} bytes a token, "
        has_kv = sizes.fp8_kv_token != sizes.kv_token
        eight = f"{sizes.fp8_kv_token:,} with kv.dtype={EIGHT_BITS} {ON_GPUS}"
        text += eight if has_kv else "which stay"
        if driver.memory:
            share = config.decode.tp * MEMORY_FRACTION * min(driver.memory)
            kinds = (sizes.weights, sizes.kv_token), (sizes.fp8_weights, sizes.fp8_kv_token)
            now, then = (max(0, int(share - weights) // token) for weights, token in kinds)
            figures |= {"kv_tokens": now, "fp8_kv_tokens": then}
            text += f"; a decode worker here has about {now:,} tokens of KV, with both {then:,}: "
            text += f"{now // ROW} and {then // ROW} rows of {ROW:,}"
        yield ok("fp8", text, figures=figures)
