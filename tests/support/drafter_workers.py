"""Workers in lockstep for tests of drafters: four layers of the bundled model, in float32."""

from dataclasses import replace
from typing import Any

from tests.support.delay_mix import sections
from tests.support.lockstep import DECODE, Lockstep
from tests.support.recorded import RecordedChunks, RecordedMemory, RecordedSteps
from tests.support.shallow import shallow

TARGET = shallow(4)
VOCAB_SIZE = 1024
MAX_LEN = 256
ENOUGH = 4000  # tokens of a pool in which nobody is preempted


def workers(
    *,
    num_prefill: int = 0,
    page_size: int = 16,
    num_tokens: int = ENOUGH,
    num_groups: int = 1,
    overlap: bool = True,
    graph: bool = False,
    chunks: str = "eager",
    spec: dict[str, object] | None = None,
    **engine: Any,
) -> Lockstep:
    """One decode worker, maybe a prefill worker.

    Args:
        num_prefill: 0 or 1; with 1, all prompts are computed there and pulled.
        page_size: tokens a page.
        num_tokens: that the pages of a pool hold.
        num_groups: layer groups of a pull.
        overlap: steps are launched before the one before has settled (`spec.overlap`).
        graph: decode steps are replays, see recorded.py.
        chunks: how those of prompts are launched: "eager", or replays in "pieces" or "whole".
        spec: section of the configuration; None: no speculation.
        engine: what differs in that section.
    """
    mode = "always" if num_prefill else "never"
    config = sections("cpu", mode, num_groups, num_pages=num_tokens // page_size + 1, **engine)
    config["model"] |= {"path": str(TARGET), "max_model_len": MAX_LEN}
    config["kv"]["page_size"] = page_size
    config["spec"] = {"overlap": overlap, **(spec or {})}
    config["engine"] = {"strict": True, **config["engine"]}  # poisons what nobody has written
    made = Lockstep(config, num_prefill=num_prefill)
    for peer, engine in made.engines.items():
        runner, of = engine.runner, dict[str, Any]()
        if chunks != "eager":
            of["chunks"] = RecordedChunks(runner.loaded, whole=chunks == "whole")
        if graph and peer == DECODE:
            of["decode"] = RecordedSteps(runner.loaded, RecordedMemory())
        for each in of.values():
            each.record()
        runner.graphs = replace(runner.graphs, **of)
    return made
