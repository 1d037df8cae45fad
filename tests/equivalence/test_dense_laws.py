"""The same request gives the same ids, whatever serves it: of families whose layers differ.

The oracle is `transformers`; test_models.py compares logits. All in float32.
"""

import random
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from tests.equivalence import test_models as models
from tests.support.chain_checkpoints import write_chain
from tests.support.engines import running
from tests.support.expert_families import EXPERTS
from tests.support.laws import ids
from tests.support.lockstep import Ask, Lockstep
from tests.support.pairwise import in_whole, one_in
from tests.support.places import place
from tests.support.recorded import RecordedMemory, replay
from worker.api import Sampling
from worker.config import WorkerConfig
from worker.run.compiled import TracedForward
from worker.run.piecewise import PiecewiseChunks
from worker.start.build import Place, build_engine

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(r"ignore:::torch\."),  # of Dynamo
]

NUM_TOKENS, LENGTHS = 16, (1, 3, 17, 40, 64)
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
# Each has a part that no other has: rows that are moved, scales, norms of whole parts, no rope;
# windows of all layers and of some, caps, two ropes, layer norms, an activation without a gate.
# Experts are not traced.
CASES = (
    *("glm4", "granite", "olmo2", "phi4-mini", "smollm3"),
    *("mistral-window", "gemma2", "gemma3", "exaone4", "command-r-norms", "nemotron"),
)
SPARSE = ("qwen3-moe-mixed", "mixtral")
MODELS = models.CASES | EXPERTS
SERVED: dict[str, dict[str, Any]] = {
    "here": {"mode": "never"},
    "pulled": {"mode": "always"},
    "chunks, ngram": {"mode": "never", "max_prefill_tokens": 24, "widths": [1, 4]},
    "pulled, two ranks, ngram": {"mode": "always", "widths": [4], "decode_tp": 2},
    "pulled from two ranks": {"mode": "always", "prefill_tp": 2, "max_prefill_tokens": 24},
    "by two ranks from four": {"mode": "always", "widths": [4], "prefill_tp": 4, "decode_tp": 2},
    "by four ranks": {"mode": "always", "max_prefill_tokens": 24, "decode_tp": 4},
}


def prompts(max_len: int = 256) -> list[tuple[int, ...]]:
    """Those that leave room for an answer."""
    rng = random.Random(7)
    size = models.SHAPE["vocab_size"]
    fit = (n for n in LENGTHS if n + NUM_TOKENS <= max_len)
    return [tuple(rng.randrange(2, size) for _ in range(n)) for n in fit]


@cache
def saved(case: str) -> tuple[Path, list[list[int]]]:
    """(directory of the model, greedy ids of transformers for each prompt)."""
    path = place("dense") / case
    return path, greedy(models.save_random(path, *MODELS[case]))


def greedy(model: Any) -> list[list[int]]:
    """What transformers continues each prompt with."""
    wanted, config = [], model.config.get_text_config()
    # What follows changes nothing, but longrope: it is of a long text.
    more = 32 if "longrope" in str(config.rope_parameters) else 0
    for prompt in prompts(config.max_position_embeddings):
        ids: list[int] = []
        for _ in range(NUM_TOKENS):
            ids.append(models.expect(model, [*prompt], [*ids, *[0] * more, 0])[0][len(ids)])
        wanted.append(ids)
    return wanted


def sections(path: Path, mode: str = "never", **engine: object) -> dict[str, Any]:
    return {
        "model": {"path": str(path), "dtype": "float32"},
        "kv": {"page_size": 16},
        "engine": {"device": "cpu", "threads": 1, "max_num_reqs": 8, "num_pages": 64, **engine},
        "disaggregation": {"mode": mode},
    }


def paired(ways: Iterable[str]) -> list[Any]:
    """(case, way): a quarter of the cases in one way each; all with --whole."""
    ways = list(ways)
    return [
        pytest.param(
            case, way, marks=[pytest.mark.whole] * (i % len(ways) != j or i // len(ways) % 4 > 0)
        )
        for i, case in enumerate((*CASES, *SPARSE))
        for j, way in enumerate(ways)
    ]


def served(
    path: Path,
    how: Mapping[str, Any],
    kv_dtype: str = "auto",
    dtype: str = "float32",
    num: int | None = None,
    **engine: Any,
) -> list[list[int]]:
    """The ids of each prompt, served in this way, the same with cached prefixes as without.

    num: of prompts; None: all.
    """
    config, asked = {**how}, prompts(models.read_model_shape(path).max_position_embeddings)[:num]
    ranks = {name: config.pop(name) for name in ("prefill_tp", "decode_tp") if name in config}
    widths, drafter = config.pop("widths", None), config.pop("drafter", "ngram")
    made = sections(path, **config, **engine)
    made["kv"]["dtype"], made["model"]["dtype"] = kv_dtype, dtype
    if short := models.SHORT.get(path.name):
        made["model"]["max_model_len"] = short
    if widths:
        made["spec"] = {"drafter": drafter, "widths": widths}
    with running(made, num_prefill=int(config["mode"] == "always"), **ranks) as cluster:
        first, second = (ids(cluster.client.generate(asked, GREEDY)) for _ in range(2))
    assert first == second
    assert all(len(ids) == GREEDY.max_tokens for ids in first)
    return first


@pytest.mark.parametrize(("case", "how"), paired(SERVED))
def test_whatever_serves_a_request_changes_nothing(case: str, how: str) -> None:
    path, wanted = saved(case)
    assert served(path, SERVED[how]) == wanted


@pytest.mark.parametrize("case", one_in(3, ["command-r-norms", "gemma2", "mistral-window"]))
def test_a_chain_that_is_fed_by_the_layers_changes_nothing(case: str, tmp_path: Path) -> None:
    """Its drafts are random: windows of four tokens are verified, and most are rejected."""
    path, wanted = saved(case)
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    target = models.read_model_shape(path)
    write_chain(tmp_path, "specforge", target, own=("lm_head",), eagle_config=taps)
    made = sections(path, "always")
    made["spec"] = {"drafter": "chain", "path": str(tmp_path), "widths": [4]}
    with running(made, num_prefill=1) as cluster:
        for _ in range(2):
            assert ids(cluster.client.generate(prompts(), GREEDY)) == wanted


# But of a short text, which transformers turns otherwise than a long one.
@pytest.mark.parametrize("case", one_in(3, sorted({*CASES, "command-r", "olmo3"} - {"phi4-mini"})))
@torch.inference_mode()
def test_taps_hold_what_leaves_each_layer(case: str, tmp_path: Path) -> None:
    reference: Any = models.save_random(tmp_path / case, *models.CASES[case])
    engine = models.Engine(models.load(tmp_path / case))
    taps = engine.model.tap((0, 1), 64)
    prompt = models.PROMPTS[0]
    engine.step([0, 0], [prompt, models.PROMPTS[1]])
    states = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    wanted = torch.cat((states[1][0], states[2][0]), dim=-1)
    assert (taps.rows(len(prompt)) - wanted).abs().max() < models.BOUND
    engine.pool.close()


@pytest.mark.parametrize(("case", "chunks"), paired(["pieces", "whole"]))
def test_replays_change_nothing(case: str, chunks: str) -> None:
    check_replays(*saved(case), chunks)


def check_replays(path: Path, wanted: list[list[int]], chunks: str, kv_dtype: str = "auto") -> None:
    """wanted: of `prompts`; chunks: "pieces" or "whole"."""
    config = sections(path, "always", max_prefill_tokens=32)
    config["kv"]["dtype"] = kv_dtype
    made = Lockstep(config)
    try:
        replay(made, steps=True, chunks=chunks)
        asks = [Ask(prompt, GREEDY, at=i) for i, prompt in enumerate(prompts())]
        assert [answer.tokens for answer in made.serve(asks)] == wanted
    finally:
        made.close()


@pytest.mark.parametrize("case", ["llama-mlp-bias", *in_whole(*((each,) for each in CASES))])
def test_traced_layers_are_those_of_eager(case: str) -> None:
    check_traced(saved(case)[0])


def check_traced(path: Path) -> None:
    """Layers that Dynamo traced give what eager gives, also of numbers that 4 does not divide."""
    config = sections(path, max_prefill_tokens=18, strict=True) | {"role": "decode"}
    engine = build_engine(WorkerConfig.model_validate(config), Place("decode-0", "1", "127.0.0.1"))
    loaded, pieces = engine.runner.loaded, list[GraphModule]()

    def keep(piece: GraphModule, _: object) -> GraphModule:
        pieces.append(piece)
        return piece

    traced = TracedForward(loaded.model, keep)
    runner = PiecewiseChunks(loaded, RecordedMemory(), traced, 0.0)
    with torch.inference_mode():
        checks = runner.capture()
    assert checks
    assert all(check.equal for check in checks)
    assert pieces
    engine.close()


@pytest.mark.parametrize(
    ("case", "prefill", "decode", "num"),
    [
        (SPARSE[0], "expert", "tensor", 4),
        *in_whole((SPARSE[0], "expert", "tensor", 2), (SPARSE[0], "tensor", "expert", 4)),
        *in_whole((SPARSE[1], "expert", "tensor", 2), (SPARSE[1], "tensor", "expert", 4)),
    ],
)
def test_workers_may_divide_experts_in_other_ways(case, prefill: str, decode: str, num) -> None:
    path, wanted = saved(case)
    made = sections(path, "always", experts=prefill)
    other = {"engine": made["engine"] | {"experts": decode}}
    with running(made, decode_sections=other, prefill_tp=num, decode_tp=2) as cluster:
        assert ids(cluster.client.generate(prompts(), GREEDY)) == wanted
