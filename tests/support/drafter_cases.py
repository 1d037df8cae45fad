"""Workers for tests of drafters, requests, their plain answers, and drafters fitted to those.

The model is four layers of the bundled one, in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import fitted_blocks, fitted_drafters
from tests.support.chain_reference import ChainReference, Reference
from tests.support.delay_mix import sections
from tests.support.dflash_reference import DFlashReference
from tests.support.drafter_audit import audit, trace_is_right
from tests.support.engines import Answer
from tests.support.lockstep import Ask, Lockstep, Window
from tests.support.pairwise import whole
from tests.support.prompts import VOCAB, problem_ids
from tests.support.recorded import replay
from tests.support.shallow import shallow
from worker.api import Sampling

TARGET = shallow(4)
MAX_LEN = 256
ENOUGH = 4000  # tokens of a pool in which nobody is preempted
NUM, NUM_TOKENS = (6, 32) if whole else (4, 24)


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
    target: Path = TARGET,
    **engine: Any,
) -> Lockstep:
    """One decode worker, maybe a prefill worker, which computes all prompts then.

    Args:
        num_tokens: that the pages of a pool hold.
        num_groups: layer groups of a pull.
        graph: decode steps are replays, see recorded.py.
        chunks: how those of prompts are launched: "eager", or replays in "pieces" or "whole".
        spec: section of the configuration; None: no speculation.
        engine: what differs in that section.
    """
    mode = "always" if num_prefill else "never"
    config = sections("cpu", mode, num_groups, num_pages=num_tokens // page_size + 1, **engine)
    config["model"] |= {"path": str(target), "max_model_len": MAX_LEN}
    config["kv"]["page_size"] = page_size
    config["spec"] = {"overlap": overlap, **(spec or {})}
    config["engine"] = {"strict": True, **config["engine"]}  # poisons what nobody has written
    made = Lockstep(config, num_prefill=num_prefill)
    replay(made, steps=graph, chunks=chunks)
    return made


@dataclass(frozen=True)
class Known:
    """Requests and their answers without speculation, and drafters that are fitted to those."""

    asked: dict[str, list[Ask]]  # by FACTORS["drawn"]
    answers: dict[str, list[Answer]]
    root: Path

    @classmethod
    def made(cls, root: Path) -> "Known":
        """Serve them plainly; drafters are fitted as they are asked for."""
        ids, longest = problem_ids(2 * NUM), Sampling(NUM_TOKENS, temperature=0.0, ignore_eos=True)
        prompts = [ids[2 * number] + ids[2 * number + 1] for number in range(NUM)]
        greedy = [
            Ask(prompt, longest, number).but(seed=number) for number, prompt in enumerate(prompts)
        ]
        filters = {}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.01}
        seeded = [
            ask.but(temperature=0.7, seed=(number + 1 << 35) + 5, **filters[number % 3])
            for number, ask in enumerate(greedy)
        ]
        asked, made = {"greedy": greedy, "seeded": seeded}, workers()
        answers = {drawn: made.serve(each) for drawn, each in asked.items()}
        made.close()
        return cls(asked, answers, root)

    def directory(self, form: str) -> Path:
        """Of a drafter; EAGLE-3 with a draft vocabulary, maybe fed with the last layer, too."""
        path = self.root / form
        if not path.exists():
            texts = [text for drawn in self.asked for text in self.texts(drawn)]
            options: dict[str, Any] = {}
            if form in fitted_blocks.FORMS:
                d2t = fitted_drafters.map_of(texts, 300, VOCAB)
                fitted_blocks.write(path, TARGET, form, d2t if "mixed" in form else None)
                fitted_blocks.fit(path, TARGET, texts, NUM_TOKENS)
                return path
            kind, _, last = form.partition(" ")
            if kind == "eagle3":
                options["d2t"] = fitted_drafters.map_of(texts, 300, VOCAB)
            if last:
                options["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
            fitted_drafters.write(path, TARGET, kind, **options)
            fitted_drafters.fit(path, TARGET, texts)
        return path

    def texts(self, drawn: str) -> list[list[int]]:
        both = zip(self.asked[drawn], self.answers[drawn], strict=True)
        return [[*ask.prompt, *answer.tokens] for ask, answer in both]


@cache
def reference_of(directory: Path) -> Reference:
    of_blocks = directory.name in fitted_blocks.FORMS
    return (DFlashReference if of_blocks else ChainReference)(TARGET, directory)


def speculation(directory: Path, *widths: int) -> dict[str, object]:
    drafter = "dflash" if directory.name in fitted_blocks.FORMS else "chain"
    return {"drafter": drafter, "path": str(directory), "widths": list(widths)}


def warm(made: Lockstep, asked: Sequence[Ask]) -> None:
    """Serve beginnings of the prompts, of other lengths each, some on the decode worker alone."""
    short, num = Sampling(1, temperature=0.0, ignore_eos=True), len(asked)
    made.serve(
        [
            Ask(ask.prompt[: len(ask.prompt) * (number + 1) // num], short, local=number % 2 == 0)
            for number, ask in enumerate(asked)
        ]
    )
    made.windows.clear()


def judge(
    made: Lockstep,
    asked: Sequence[Ask],
    answers: Sequence[Answer],
    reference: Reference,
    *,
    traces: Sequence[Sequence[Window]] | None = None,
    block: int = 0,
    in_pages: bool = True,
) -> int:
    """Assert that traces and pages are right once `made` has served; see trace_is_right and audit.

    traces: of each request; None: those of one call of `made.serve`; in_pages: the tree keeps some,
    as it does without recurrent layers. Returns how many drafts were
    compared, of requests that nobody gave up.
    """
    num_compared = 0
    for number, (ask, answer) in enumerate(zip(asked, answers, strict=True)):
        if ask.cut is None and ask.abort is None:
            windows = made.windows[number] if traces is None else traces[number]
            text, sampling = [*ask.prompt, *answer.tokens], ask.sampling
            max_len = min(MAX_LEN, len(ask.prompt) + sampling.max_tokens)
            num_compared += trace_is_right(windows, text, reference, sampling, max_len, block)
    for engine in made.engines.values() if in_pages else ():
        assert audit(engine, reference) > 0
    return num_compared


def serve(
    made: Lockstep, asked: Sequence[Ask], *, alone: bool
) -> tuple[list[Answer], list[list[Window]]]:
    """(answers, windows) of each, all at once or one after the other."""
    if not alone:
        answers = made.serve(asked)
        return answers, [made.windows[number] for number in range(len(asked))]
    answers, traces = [], []
    for ask in asked:
        made.windows.clear()
        answers += made.serve([replace(ask, at=0)])
        traces.append(made.windows[0])
    return answers, traces
