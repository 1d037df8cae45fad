"""Texts of one process: one decode worker that computes prompts by itself."""

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

from tests.support.prompts import problem_ids, tokenizer
from worker.api import FinishReason, Sampling

SECTIONS: dict[str, dict[str, object]] = {
    "engine": {"device": "cpu", "threads": 1, "cpu_pool_bytes": 160 << 20, "prefix_cache": False},
    "disaggregation": {"mode": "never"},
}


def sampling_of(index: int, max_tokens: int) -> Sampling:
    """Greedy for even requests, seeded with every filter for odd ones."""
    if index % 2 == 0:
        return Sampling(max_tokens=max_tokens, temperature=0.0)
    return Sampling(
        max_tokens=max_tokens, temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=1000 + index
    )


def body_of(index: int, max_tokens: int) -> dict[str, object]:
    """The same parameters as the fields of an OpenAI request."""
    sampling = sampling_of(index, max_tokens)
    if sampling.temperature == 0:
        return {"temperature": 0, "max_tokens": max_tokens}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "max_tokens": max_tokens,
        "extra_body": {"top_k": sampling.top_k, "min_p": sampling.min_p},
    }


DIRECTORY = "KVLANE_TEST_TEXTS"  # where a process and those that it starts find what they made


@functools.cache
def reference_texts(num: int, max_tokens: int) -> tuple[tuple[str, str], ...]:
    """(text, finish_reason) of `num` held-out problems."""
    if DIRECTORY not in os.environ:
        os.environ[DIRECTORY] = made = tempfile.mkdtemp(prefix="kvlane-texts-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
    file = Path(os.environ[DIRECTORY]) / f"{num}-{max_tokens}.json"
    if not file.exists():
        file.write_text(json.dumps(made_texts(num, max_tokens)))
    return tuple((text, reason) for text, reason in json.loads(file.read_text()))


def made_texts(num: int, max_tokens: int) -> list[tuple[str, str]]:
    """All at once, in this process: tests/equivalence shows that each gets what it gets alone."""
    from tests.support.engines import running  # torch, where they are made only

    prompts, texts = problem_ids(num), []
    samplings = [sampling_of(index, max_tokens) for index in range(num)]
    with running(SECTIONS, num_prefill=0) as cluster:
        for answer in cluster.client.generate(prompts, samplings):
            assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            text = tokenizer().decode(answer.tokens, skip_special_tokens=True)
            texts.append((text, answer.finish_reason.value))
    return texts
