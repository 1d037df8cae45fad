"""The README.md that lies beside the weights of the model `tiny`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.accuracy import Score, table
from benchmarks.train.problems import HELD_OUT_TEMPLATES, trained_templates

_TEXT = """\
# tiny

A language model of {num_params:,} parameters, made for kvlane from nothing, so that the whole
cluster can be run and judged on a laptop. It answers grade-school word problems step by step and
ends with `#### n`; greetings and a little small talk too. It knows nothing else.

- Architecture: Qwen3 (6 layers, hidden 192, 4 query heads, 2 KV heads of 64, tied embeddings,
  rope theta 10000, 2048 positions), weights in bfloat16.
- Tokenizer: byte-level BPE of 1024 entries, one token per digit, ChatML template, `<|im_end|>`
  ends a turn.
- Text: made by `benchmarks/train/`: {num_trained} problem templates with drawn names, things and
  numbers, stories put together from events, plain dialogue, chats of several turns up to 1024
  tokens. Nothing was downloaded.
- {num_held_out} more templates are held out, the model never sees them:{held_out}.

## How it was made

    {command}

{minutes:.1f} minutes on {machine}; {versions}.
The loss counts answer tokens only.

## Measured accuracy

Greedy decoding, exact match of the final number, on problems that training never drew; from these
bfloat16 weights, computed in float32:

{table}

"trained" are new problems of trained templates, "held_out" problems of held-out templates: the
second figure says how little the model transfers to wordings it never saw. Again, here or against
a server:

    python -m benchmarks.accuracy --held-out [--url http://127.0.0.1:8000]
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One training run, as its README tells it."""

    command: str
    machine: str
    versions: str
    minutes: float
    num_params: int


def readme(run: Run, scores: Sequence[Score]) -> str:
    """The text of README.md."""
    lines = [f"    {line}" for line in table(scores).splitlines()]
    return _TEXT.format(
        num_params=run.num_params,
        num_trained=len(trained_templates()) - 1,  # stories are told apart
        num_held_out=len(HELD_OUT_TEMPLATES),
        held_out="\n  " + ", ".join(HELD_OUT_TEMPLATES),
        command=run.command,
        machine=run.machine,
        versions=run.versions,
        minutes=run.minutes,
        table="\n".join(lines),
    )
