"""Exact-match accuracy on held-out word problems: `python -m benchmarks.accuracy`.

With --url it asks an OpenAI-compatible server; without, it decodes the weights in this process, in
float32. Only the second needs torch and transformers. --trace asks a kvlane how many tokens a step
of speculation has yielded. --newcomers decodes what newcomers ask, in wordings never trained
(newcomers.toml): sums, short JSON, calls; and prints each that is wrong with what was said.
--agents decodes new chats of agents (see train/agents.py).
"""

import argparse
import json
import os
import re
import statistics
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.load.report import aligned
from benchmarks.output import parser
from benchmarks.train.problems import Problem, held_out_problems, parse_value

MAX_NEW_TOKENS = 200
AT_ONCE = 250  # problems of one batch
DEFAULT_MODEL = Path("worker/assets/tiny")
DEFAULT_URL = "http://127.0.0.1:8000"
CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said to one problem."""

    text: str
    num_prompt_tokens: int
    num_answer_tokens: int
    finished: bool  # ended its turn by itself
    yields: tuple[int, ...] = ()  # tokens of each decode step that verified drafts


def score(split: str, problems: Sequence[Problem], replies: Sequence[Reply]) -> dict[str, Any]:
    """Judges replies[i] as the answer to problems[i]; `step_tokens` is 0 where it is not known."""
    wrong: Counter[str] = Counter()
    for problem, reply in zip(problems, replies, strict=True):
        if parse_value(reply.text) != problem.value:
            wrong[problem.template] += 1
    yields = [num for reply in replies for num in reply.yields]
    return {
        "split": split,
        "num": len(problems),
        "correct": len(problems) - wrong.total(),
        "percent": 100 - 100 * wrong.total() / len(problems),
        "finished": sum(reply.finished for reply in replies),
        "prompt_tokens": _spread([reply.num_prompt_tokens for reply in replies]),
        "answer_tokens": _spread([reply.num_answer_tokens for reply in replies]),
        "step_tokens": statistics.mean(yields or [0]),
        "wrong_by_template": dict(wrong.most_common()),
    }


def table(scores: Sequence[dict[str, Any]]) -> str:
    """The scores as lines of text; token columns are mean (min-max)."""
    rows = [["templates", "problems", "exact", "percent", "prompt", "answer", "tokens of a step"]]
    for item in scores:
        spreads = (item["prompt_tokens"], item["answer_tokens"])
        rows.append([item["split"], str(item["num"]), str(item["correct"])])
        rows[-1] += [f"{item['percent']:.1f}", *("{:.0f} ({}-{})".format(*of) for of in spreads)]
        rows[-1].append(f"{item['step_tokens']:.2f}" if item["step_tokens"] else "-")
    return "\n".join(aligned(rows))


def local_score(model: Path, num: int, split: str, device: str = "cpu") -> dict[str, Any]:
    """Decodes the weights of a folder greedily, in this process, and judges them."""
    problems = held_out_problems(num, templates=split)
    chats = [{"conversation": [{"role": "user", "content": p.question}]} for p in problems]
    return score(split, problems, decode_chats(model, chats, device))


def server_score(args: argparse.Namespace, split: str) -> dict[str, Any]:
    """Asks a server, some problems at a time, and judges what it says."""
    url = args.url.rstrip("/").removesuffix("/v1")
    name = args.served_name or _fetch(f"{url}/v1/models")["data"][0]["id"]
    problems = held_out_problems(args.num, templates=split)
    asking = partial(ask, url, name, trace=args.trace)
    with ThreadPoolExecutor(args.concurrency) as pool:
        return score(split, problems, list(pool.map(asking, (p.question for p in problems))))


def load_model(folder: Path, device: str = "cpu") -> tuple[Any, Any]:
    """Model in float32 and tokenizer, None if there is none, as transformers loads them.

    Untyped: by transformers' own types its models have neither `to` nor `generate`.
    """
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # AutoTokenizer takes the class of some types of models, which splits text in its own way.
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
    return model.to(device).eval(), tokenizer


def decode_chats(folder: Path, chats: Sequence[dict[str, Any]], device: str) -> list[Reply]:
    """Greedy replies of the weights in a folder, computed in float32.

    A chat is what the chat template takes: `conversation`, perhaps `tools`.
    """
    import torch

    model, tokenizer = load_model(folder, device)
    limits: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False}
    replies: list[Reply] = []
    for asked in (chats[at : at + AT_ONCE] for at in range(0, len(chats), AT_ONCE)):
        form: Any = {"tokenize": False, "add_generation_prompt": True}
        texts = [tokenizer.apply_chat_template(**chat, **form) for chat in asked]
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(device)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        with torch.inference_mode():
            output = model.generate(input_ids=ids, attention_mask=mask, **limits)
        answers = output[:, ids.shape[1] :].tolist()
        for answer, prompt_len in zip(answers, mask.sum(-1).tolist(), strict=True):
            finished = tokenizer.eos_token_id in answer
            length = answer.index(tokenizer.eos_token_id) if finished else len(answer)
            text = tokenizer.decode(answer[:length])
            replies.append(Reply(text, prompt_len, length + finished, finished))
    return replies


def ask(url: str, model: str, question: str, *, trace: bool = False) -> Reply:
    """One chat completion at temperature 0; raises urllib's errors when the server fails.

    trace: ask for its accept trace too. A request's first window has no drafts: it does not count.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": MAX_NEW_TOKENS,
        **({"return_trace": True} if trace else {}),
    }
    answer = _fetch(f"{url}/v1/chat/completions", body)
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    return Reply(
        text=choice["message"]["content"] or "",
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_answer_tokens=usage.get("completion_tokens", 0),
        finished=choice["finish_reason"] == "stop",
        yields=tuple(
            step["num_accepted"] + 1
            for step in choice.get("kvlane_trace", ())
            if max(step["drafts"], default=-1) >= 0
        ),
    )


def _fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    key = os.environ.get("OPENAI_API_KEY", "none")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def _spread(numbers: Sequence[int]) -> tuple[float, int, int]:
    return statistics.mean(numbers), min(numbers), max(numbers)


def newcomers(kind: str) -> list[dict[str, Any]]:
    """What newcomers ask, of "sums", "json" or "tools"."""
    return tomllib.loads(Path(__file__).with_name("newcomers.toml").read_text("utf-8"))[kind]


def chat_of(item: dict[str, Any]) -> dict[str, Any]:
    """A newcomer's question as the chat template takes it."""
    made: dict[str, Any] = {"conversation": [{"role": "user", "content": item["ask"]}]}
    if tool := item.get("tool"):
        properties = {key: {"type": kind} for key, kind in tool["parameters"].items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        made["tools"] = [{"type": "function", "function": {**tool, "parameters": schema}}]
    return made


def said(kind: str, text: str) -> Any:
    """What a reply says: a number, an object, or a call's arguments; or None."""
    if kind == "sums":
        return parse_value(text)
    if kind == "tools":
        found = CALL.fullmatch(text)
        text = found[1] if found else ""
    try:
        read = json.loads(text)
    except ValueError:
        return None
    return read if kind == "json" else read.get("arguments")


def judge_newcomers(model: Path, device: str) -> None:
    """Prints a line for each kind, and what was wrong."""
    for kind in ("sums", "json", "tools"):
        items = newcomers(kind)
        replies = decode_chats(model, [chat_of(item) for item in items], device)
        texts = zip(items, (reply.text for reply in replies), strict=True)
        wrong = [(item, text) for item, text in texts if said(kind, text) != item["says"]]
        print(f"{kind}: {len(items) - len(wrong)} of {len(items)} right")
        for item, text in wrong:
            print(f"  {item['ask']}\n    {text!r}, not {item['says']}")


def main() -> None:
    """Prints one line per split."""
    made = parser(__doc__)
    add = made.add_argument
    add("--model", type=Path, default=DEFAULT_MODEL, help="folder of the weights")
    add("--num", type=int, default=500, help="problems of a split")
    add("--url", nargs="?", const=DEFAULT_URL, help="ask this server instead")
    add("--served-name", help="model name at the server (default: its first)")
    add("--concurrency", type=int, default=32, help="requests at a time")
    add("--trace", action="store_true", help="tokens of a step, from a kvlane")
    add("--held-out", action="store_true", help="held-out templates too")
    add("--newcomers", action="store_true", help="what newcomers ask, instead")
    add("--agents", type=int, nargs="*", metavar="TOKENS", help="chats of agents, so long, instead")
    add("--device", default="cpu", help="where to decode without --url")
    args = made.parse_args()
    if args.newcomers:
        return judge_newcomers(args.model, args.device)
    if args.agents is not None:
        from benchmarks.agents import judge_agents  # torch's

        return judge_agents(args.model, args.device, args.agents or (2000, 16000, 60000))
    scores = [
        server_score(args, split)
        if args.url
        else local_score(args.model, args.num, split, args.device)
        for split in ("trained", "held_out")[: 1 + args.held_out]
    ]
    print(table(scores))
    if args.json:
        args.json.write_text(json.dumps(scores, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
