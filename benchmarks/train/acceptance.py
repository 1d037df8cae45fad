"""How many tokens of a verify window the target accepts, in plain torch and float32.

The target answers greedily, the drafter drafts behind every token of the answers, and the windows
are walked as a server steps: the first token of an answer comes from the prompt's step, the second
from a step without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.accuracy import MAX_NEW_TOKENS
from benchmarks.train.answers import Speaker, set_right
from benchmarks.train.base import Drafter, load_drafter
from benchmarks.train.problems import held_out_problems

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

AT_ONCE = 50  # problems of one batch


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The steps that one split of the problems takes."""

    split: str
    num_problems: int
    num_steps: int  # those without drafts as well
    num_accepted: int
    by_draft: tuple[float, ...]  # share of the windows in which drafts 1 … k are all right

    @property
    def mean(self) -> float:
        return self.num_accepted / self.num_steps


def table(found: Sequence[Acceptance]) -> str:
    """One line for each split; `by draft` are the shares in which drafts 1 … k are all right."""
    width = len(found[0].by_draft) + 1
    lines = [f"templates  problems  steps  accepted tokens a step, of {width}  by draft"]
    for item in found:
        shares = " ".join(f"{share:.3f}" for share in item.by_draft)
        counts = f"{item.split:<9}  {item.num_problems:<8}  {item.num_steps:<5}"
        lines.append(f"{counts}  {item.mean:<29.2f}  {shares}")
    return "\n".join(lines)


def measure(
    kind: type[Drafter],
    target: Path,
    folder: Path,
    num: int,
    split: str,
    device: str = "cpu",
    seed: int = 0,
) -> Acceptance:
    """Measures the saved drafter of `folder` on problems that training never drew."""
    from transformers import Qwen3ForCausalLM  # takes seconds

    model: Any = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32)
    model.to(device)
    speaker = Speaker(model, kind.taps)
    drafter = load_drafter(kind, folder, model.model.embed_tokens.weight)
    problems = [problem.question for problem in held_out_problems(num, seed, split)]
    runs: list[list[int]] = []
    for start in range(0, num, AT_ONCE):
        texts = greedy_texts(model, target, problems[start : start + AT_ONCE])
        said = speaker.read(texts, own_only=False)
        batch = set_right(said, kind.num_drafts, device)
        with torch.inference_mode():
            drafts = drafter.drafts(batch)
        num_right = (drafts == batch.labels).cumprod(0).sum(0).tolist()
        for row, (ids, num_prompt) in zip(num_right, texts, strict=True):
            num_anchors = len(ids) - 1 - num_prompt
            runs.append(row[len(row) - num_anchors :])
    return walk(split, runs, kind.num_drafts + 1)


def walk(split: str, runs: Sequence[Sequence[int]], width: int) -> Acceptance:
    """Steps through answers as a server does.

    Args:
        split: of the problems.
        runs: for each answer and each of its tokens but the last, the number of drafts behind
            that token which are right.
        width: of a window.
    """
    num_undrafted, windows = 0, [0] * width  # windows[k]: those with k right drafts
    for run in runs:
        num_undrafted += len(run) > 0
        place = 1  # the step that verifies the second token has no drafts
        while place < len(run):
            windows[run[place]] += 1
            place += 1 + run[place]
    num_windows = sum(windows)
    return Acceptance(
        split=split,
        num_problems=len(runs),
        num_steps=num_undrafted + num_windows,
        num_accepted=sum(map(len, runs)),
        by_draft=tuple(sum(windows[num:]) / num_windows for num in range(1, width)),
    )


@torch.inference_mode()
def greedy_texts(
    model: Qwen3ForCausalLM, folder: Path, questions: Sequence[str]
) -> list[tuple[Tensor, int]]:
    """Prompt and greedy answer of each question: (ids, number of prompt tokens)."""
    from transformers import AutoTokenizer  # takes seconds

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    # By transformers' types its own models have no `generate`.
    generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    output = generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    ).cpu()
    found, width = [], inputs["input_ids"].shape[1]
    for ids, num_prompt in zip(output, inputs["attention_mask"].sum(-1).tolist(), strict=True):
        ends = (ids[width:] == tokenizer.eos_token_id).nonzero()
        end = width + int(ends[0]) + 1 if len(ends) else len(ids)
        found.append((ids[width - num_prompt : end], num_prompt))
    return found
