"""lm-eval against a real cluster: a task of likelihoods and one of generation, on data of our own.

Likelihoods that it reports are those of `transformers` for the same checkpoint.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.train.problems import held_out_problems
from tests.e2e.harness import REPOSITORY, Serve
from tests.e2e.shared import USUAL, Clusters
from tests.support.patience import HANG_S
from tests.support.prompts import TINY, tokenizer

PROGRAM = REPOSITORY / ".tools" / "lm_eval" / "bin" / "lm_eval"
TASKS = REPOSITORY / "tests" / "clients" / "lm_eval"
NUM = 12
END = "<|im_end|>"


def documents() -> list[dict[str, Any]]:
    made = []
    for i, problem in enumerate(held_out_problems(NUM)):
        answer = int(problem.answer.rpartition("####")[2])
        choices = [f"The answer is {answer + by}." for by in (0, 1, 10)]
        choices = choices[i % 3 :] + choices[: i % 3]
        made.append({
            "prompt": f"<|im_start|>user\n{problem.question}{END}\n<|im_start|>assistant\n",
            "choices": choices, "label": choices.index(f"The answer is {answer}."),
            "answer": str(answer),
        })  # fmt: skip
    return made


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def thought(model: Any, context: str, more: str) -> tuple[float, bool]:
    """The log-likelihood of what follows a context, and whether it is the likeliest text.

    White space at a context's end counts as what follows, as lm-eval has it.
    """
    whole, num = ids(context + more), len(ids(context.rstrip()))
    with torch.inference_mode():
        logprobs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    at, tokens = logprobs[num - 1 : -1], torch.tensor(whole[num:])
    likeliest = bool((at.argmax(-1) == tokens).all())
    return at.gather(1, tokens[:, None]).sum().item(), likeliest


@pytest.fixture
def cluster(clusters: Clusters) -> Serve:
    return clusters.lend(*USUAL)


def evaluated(cluster: Serve, directory: Path) -> dict[str, Any]:
    """What lm-eval says: `results`, and the samples of the choices."""
    lines = "".join(json.dumps(each) + "\n" for each in documents())
    (directory / "problems.jsonl").write_text(lines)
    served = f"base_url={cluster.url}/v1/completions,num_concurrent=2,max_retries=1"
    done = subprocess.run(
        [str(PROGRAM), "run", "--model", "local-completions",
         "--tasks", "kvlane_choice,kvlane_sums",
         "--model_args", f"model=tiny,tokenizer={TINY},{served}", "--include_path", str(TASKS),
         "--output_path", "out", "--log_samples"],
        cwd=directory, capture_output=True, text=True, timeout=3 * HANG_S, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = directory.glob("out/**/results_*.json")
    (samples,) = directory.glob("out/**/samples_kvlane_choice_*.jsonl")
    choices = sorted(map(json.loads, samples.open()), key=lambda sample: sample["doc_id"])
    return {"results": json.loads(path.read_text())["results"], "choices": choices}


@pytest.mark.skipif(not PROGRAM.exists(), reason="no lm-eval; see tests/clients/README.md")
def test_scores_are_those_of_transformers(cluster: Serve, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM  # seconds, where these tests run only

    found = evaluated(cluster, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    num_right = 0
    for document, sample in zip(documents(), found["choices"], strict=True):
        wanted = [thought(model, document["prompt"], choice) for choice in document["choices"]]
        told = [
            (float(value), str(likeliest) == "True") for ((value, likeliest),) in sample["resps"]
        ]
        assert [likeliest for _, likeliest in told] == [likeliest for _, likeliest in wanted]
        values = [value for value, _ in wanted]
        assert [value for value, _ in told] == pytest.approx(values, abs=1e-3)
        num_right += values.index(max(values)) == document["label"]
    assert found["results"]["kvlane_choice"]["acc,none"] == pytest.approx(num_right / NUM)
    assert found["results"]["kvlane_sums"]["exact_match,number"] > 0.5  # half of them are right
    cluster.wait_idle()
