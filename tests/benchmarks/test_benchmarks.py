"""Each benchmark in a small form on the CPU: its command runs, and its file has a row a case."""

import importlib
import json
import math
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from benchmarks import router
from benchmarks.gpu_cluster import loads, make_model, serve_config
from benchmarks.instruments import Bench, add_engine_options, build
from benchmarks.load import options as of_load
from benchmarks.load.words import Words
from benchmarks.timing import kernel_parts
from cluster.config import load
from cluster.resolve import with_devices
from router.text.tokenizer import Text
from tests.support.engines import value
from tests.support.prompts import TINY
from worker.api import Sampling

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
CONFIG = f"--model-config {TINY / 'config.json'} --prompt-len 16 --output-len 12 --page-size 16"
ENGINE = f"{CONFIG} --repeat 1"
HYBRID = ENGINE.replace("/tiny/", "/tiny-hybrid/")
CHAIN = f"--drafter {TINY.with_name('tiny-chain') / 'config.json'}"
ATTENTION = "--model tiny --dtype float32 --page-size 16 --backends reference"
LATENTS = ATTENTION.replace("--model tiny", "--model tiny-latent")
CASES = [  # command, its list of rows, fields of a row, their values
    ("engine", f"{ENGINE} --batch 1,2x24 --also top_p@2,all --cached",
     "steps", "batch prompt_len sampling",
     ["1 16 greedy", "2 24 greedy", "2 16 top_p", "1 16 all", "2 24 all"]),
    ("engine", f"{ENGINE} --phase prefill --tokens 8,16 --batch 1",
     "steps", "batch tokens", ["1 8", "1 16"]),
    ("engine", f"{HYBRID} --phase prefill --tokens 170 --batch 1 --new 40 --snapshots 4,0",
     "steps", "new snapshots matched resumed kept", ["40 4 128 128 2", "40 0 128 0 0"]),
    ("engine", f"{ENGINE} {CHAIN} --widths 1,3 --batch 2", "steps", "batch width", ["2 1", "2 3"]),
    ("engine", f"{ENGINE} {CHAIN} --widths 4 --batch 2 --accept 2.9",
     "steps", "width accept floor_ms", ["4 2.9 0.0"]),
    ("attention", f"{ATTENTION} --replays 1 --batch 1,2 --context 40 --query-len 4",
     "rows", "case way", [f"batch {n}, context 40, rows 4 reference" for n in (2, 1)]),
    ("attention", f"{ATTENTION} --replays 1 --prefill 24,32",
     "rows", "case", [f"batch 1, context {n}, rows {n}" for n in (32, 24)]),
    ("attention", f"{LATENTS} --replays 1 --batch 2 --context 40", "rows", "way", ["reference"]),
    ("attention", f"{LATENTS} --replays 1 --batch 1,2 --context 40 --expanded", "rows",
     "way num_bytes",
     ["latents 15360", "expanded 102400", "latents 7680", "expanded 51200"]),
    ("experts", "--model tiny --tokens 4 --layers 1 --replays 1", "figures", "way", [""]),
    ("recurrent", "--model tiny --rows 2 --widths 1,4 --replays 1",
     "figures", "case", ["2 rows, width 1", "2 rows, width 4"]),
    ("transfer", "--transport shm --run-bytes 4096 65536 --total-mb 1",
     "rows", "transport run_bytes", ["shm/shm 4096", "shm/shm 65536"]),
]  # fmt: skip


def ran(name: str, place: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> Any:
    path = place / "out.json"
    monkeypatch.setattr(sys, "argv", [name, *asked.split(), "--json", str(path)])
    importlib.import_module(f"benchmarks.{name}").main()
    return json.loads(path.read_text())


@pytest.mark.parametrize(("name", "asked", "rows", "fields", "cases"), CASES)
def test_a_row_is_written_for_every_case(name, asked, rows, fields, cases, tmp_path, monkeypatch):
    found = ran(name, tmp_path, monkeypatch, asked)
    written = [" ".join(str(row[field]) for field in fields.split()) for row in found[rows]]
    assert written == cases
    assert {"machine", "versions", "options"} <= found.keys()
    for row in found[rows]:
        assert math.isfinite(row.get("median_ms", 0.0))  # a slope: it may fall
        assert row.get("max_error", 0) == 0


def test_ways_to_multiply_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ran("gemm", tmp_path, monkeypatch, "--model tiny --m 4 --eight --replays 1")["rows"]
    errors = {row["way"]: row["error"] for row in rows if "error" in row}
    assert errors["product"] < 1e-2 < errors["fp8"] < 0.2
    assert {row["case"] for row in rows if "case" in row} >= {"m=4, step", "m=4, head"}


@pytest.mark.whole  # processes that import everything anew
def test_ranks_sum_by_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = "--device cpu --ranks 2 --sizes 8192 --rows 3 --hidden 256 --calls 1 --replays 1"
    found = ran("all_reduce", tmp_path, monkeypatch, asked)
    (size,), (norm,) = found["sizes"], found["norms"]
    assert (size["ways"].keys(), norm["ways"].keys()) == ({"chosen"}, {"parts", "chosen"})
    assert max(*size["errors"].values(), *norm["errors"].values()) < 2**-6


@pytest.mark.whole
def test_every_part_of_the_router_has_its_figures(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(router.run, "__defaults__", (64,))
    figures = ran("router", tmp_path, monkeypatch, "--seconds 0.4")["figures"]
    assert [name.partition(":")[0] for name in figures] == ["cost"] * 5 + ["full"] + ["calls"] * 3
    assert all(figure > 0 for figure in figures.values())


@pytest.mark.whole  # imports transformers
def test_the_bundled_model_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (score,) = ran("accuracy", tmp_path, monkeypatch, f"--num 2 --model {TINY}")
    assert score["correct"] == score["finished"] == score["num"] == 2


def test_a_batch_takes_a_prefill_step_and_a_decode_step_a_token() -> None:
    made = ArgumentParser()
    add_engine_options(made)
    made.set_defaults(phase="decode", chunk=64)
    bench = Bench(build(made.parse_args(CONFIG.split()), 3))
    counter = bench.engine.metrics.steps
    assert bench.generate(3, 16, Sampling(12, ignore_eos=True, temperature=0.0), seed=1) > 0
    taken = [value(counter(kind, "eager")) for kind in ("prefill", "decode")]
    assert taken == [1, 11], "the prompts' step draws the first tokens"
    bench.engine.close()


def test_a_trace_s_time_is_shared_out_once() -> None:
    """A kernel that waits beside the one before it counts from that one's end."""
    rows = [("_rms_norm_kernel", 10, 2), ("flash<cutlass::half_t>", 14, 5), ("nvjet", 15, 8),
            ("_skinny_gemm_kernel", 22, 0.5)]  # fmt: skip
    events = [{"cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in rows]
    events.append({"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99})
    wanted = {"products": 4, "attention": 5, "others": 2, "gaps": 2}
    assert kernel_parts(events[::-1]) == wanted
    assert kernel_parts(events[-1:]) == {}


@pytest.mark.whole
def test_a_made_model_says_a_piece_of_text_for_every_token(tmp_path: Path) -> None:
    make_model(MODELS / "qwen3-8b.json", tmp_path)
    text = Text(tmp_path)
    assert text.vocab_size == json.loads((MODELS / "qwen3-8b.json").read_text())["vocab_size"]
    tokens = [5, 1023, 1024, 99_999, text.vocab_size - 1]
    output = text.output([7])
    assert all(output.feed([token]).text for token in tokens)
    assert text.decode(tokens).endswith(f" 1024 99999 {text.vocab_size - 1}")
    words = Words(Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    assert words.is_additive
    assert max(words.ids(" ".join(words.fixed((0,), 512)))) < 1024, "the bundled words"


def test_the_configuration_of_a_cluster_loads(tmp_path: Path) -> None:
    options = Namespace(
        gpus=1, model_config=MODELS / "qwen3-8b.json", prompt_len=512, output_len=128, chunk=2048,
        concurrency=[32], mode="always", out=tmp_path, num=8, repeat=2, duration=1.0, rates=[],
    )  # fmt: skip
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(serve_config(options, TINY, "tcp")))
    config = with_devices(load(path), has_gpus=True)
    assert config.prefill.num_gpus == config.decode.num_gpus == 0.5
    assert config.decode.engine.memory_fraction == 0.425
    options.concurrency = [32, 4]
    assert [asked.concurrency for asked in parsed(options)] == [32, 4]
    options.rates = [16, 32]
    assert [asked.rate for asked in parsed(options)] == ["poisson:16", "poisson:32"]


def parsed(options: Namespace) -> list[of_load.Options]:
    return [of_load.parse(words) for words in loads(options, "tcp").values()]
