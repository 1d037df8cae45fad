"""What a model says in new chats of agents: calls, sentences on results, values of a schema.

`python -m benchmarks.accuracy --agents [TOKENS …]`. Chats are those of `train/agents.py` from seeds
that no training has.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.accuracy import CALL, load_model
from benchmarks.train.agents import agent_chat, ask
from benchmarks.train.chats import TURN_END
from benchmarks.train.tools import RESULT

SEED = 1 << 41
TOKENS_OF_ALL = 120_000  # about, of the chats of one length
MOST, LEAST = 24, 4  # chats of one length
NUM_FORMS = 24
MAX_NEW_TOKENS = 160


def judge_agents(model: Path, device: str, lengths: Sequence[int]) -> None:
    """Prints a line for each length, one for schemas, and what was wrong."""
    say = _Speaker(model, device)
    for length in lengths:
        _judge_length(say, length)
    rng = random.Random(SEED)
    made = [_led(say, rng) for _ in range(NUM_FORMS)]
    print(f"values behind their steps in a schema: {sum(made)} of {NUM_FORMS} right")


class _Speaker:
    """Greedy answers of the weights, in float32."""

    def __init__(self, folder: Path, device: str) -> None:
        self._model, self._tokenizer = load_model(folder, device)
        self._device = device

    def count(self, text: str) -> int:
        return len(self._tokenizer(text)["input_ids"])

    def answer(self, prompt: str, stop: str = TURN_END, most: int = MAX_NEW_TOKENS) -> str:
        """What follows the prompt, up to `stop`."""
        import torch

        ids = torch.tensor([self._tokenizer(prompt)["input_ids"]], device=self._device)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=most,
                do_sample=False, stop_strings=[stop], tokenizer=self._tokenizer,
            )  # fmt: skip
        text = self._tokenizer.decode(output[0, ids.shape[1] :])
        return text.partition(stop)[0].partition(TURN_END)[0]


def _chats(say: _Speaker, length: int) -> Iterator[list[str]]:
    """Segments of chats of about so many tokens whose first answer is a call."""
    rng = random.Random(SEED + length)
    while True:
        segments = agent_chat(rng, int(0.8 * length)).segments()
        called = segments[1].startswith("<tool_call>")
        if called and 0.6 * length < say.count(segments[0]) < 1.08 * length:
            yield segments


def _judge_length(say: _Speaker, length: int) -> None:
    num = max(LEAST, min(MOST, TOKENS_OF_ALL // length))
    valid, used, wrong = 0, list[bool](), list[str]()
    for segments in islice(_chats(say, length), num):
        said, wanted = say.answer(segments[0]), segments[1].removesuffix(TURN_END)
        told = [(said, wanted)]
        valid += _call(said) is not None and _call(said) == _call(wanted)
        if len(segments) > 3 and RESULT in segments[2].partition(TURN_END)[0]:
            said, wanted = say.answer("".join(segments[:3])), segments[3].removesuffix(TURN_END)
            number = re.search(r"\d+(?=\D*\Z)", wanted)
            used.append(number is not None and re.search(rf"\b{number[0]}\b", said) is not None)
            told.append((said, wanted))
        wrong += [f"  {said!r}, not {wanted!r}" for said, wanted in told if said != wanted]
    print(f"{length} tokens: {valid} of {num} calls of the right form; ", end="")
    print(f"{sum(used)} of {len(used)} answers use the result", *wrong[:8], sep="\n", flush=True)


def _call(text: str) -> Any:
    """Name, and names and types of arguments, of a call; None if it is none."""
    found = CALL.fullmatch(text)
    try:
        read = json.loads(found[1] if found else "")
        return read["name"], {key: type(value) for key, value in read["arguments"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _led(say: _Speaker, rng: random.Random) -> bool:
    """Whether a number that follows the model's own steps is the right one."""
    asked = ask(rng)
    prompt = f"<|im_start|>user\n{asked.question}{TURN_END}\n<|im_start|>assistant\n"
    prompt += '{"reasoning":"'
    prompt += say.answer(prompt, '"') + '","total":'
    return say.answer(prompt, "}", 8).strip() == str(asked.value)
