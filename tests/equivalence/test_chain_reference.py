"""The judges of chain drafters are judged: the reference against layers of `transformers` that
compute everything anew for every draft; audits and traces against an engine that is told its
drafts, and against ones that are wrong in a small way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support import fitted_drafters
from tests.support.chain_reference import ChainReference, short_name, tapped_layers
from tests.support.counted import value
from tests.support.drafter_audit import audit, prefixes, trace_is_right
from tests.support.drafter_workers import TARGET, VOCAB_SIZE, workers
from tests.support.engines import Answer
from tests.support.lockstep import DECODE, Ask, Lockstep
from tests.support.pairwise import more
from tests.support.prompts import problem_ids
from tests.support.regions import add_regions
from worker.api import Sampling
from worker.forward.batch import Batch
from worker.ops.philox import gumbel_ref
from worker.run.engine import Engine
from worker.step.state import SampledRows

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 5
FEW = 480  # tokens of a pool for which requests preempt each other
D2T = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))[:300].sort().values
D2T -= torch.arange(300)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
INNER = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "draft vocabulary": ("eagle3", {"d2t": D2T}),
    "head of the target": ("eagle3", {"own": ()}),
    "own embedding": ("eagle3", {"own": ("lm_head", "embed_tokens")}),
    "norm_before_residual": ("eagle3", {"norm_before_residual": True}),
    "norm_before_fc": ("eagle3", {"norm_before_fc": True}),
    "fc_norm": ("eagle3", {"fc_norm": True}),
    "norm_output": ("eagle3", {"norm_output": True}),
    "rope_scaling": ("eagle3", {"rope_scaling": LLAMA3}),
    "last layer tapped": ("eagle3", {"eagle_config": INNER}),
    "ids of inputs": (
        "eagle3",
        {"eagle_config": "absent", "eagle_aux_hidden_state_layer_ids": [2, 3, 1]},
    ),
    "no ids": ("eagle3", {"eagle_config": "absent"}),
    "eagle": ("eagle", {}),
    "mtp": ("mtp", {}),
}
SAMPLINGS = Sampling(40, temperature=0.0), Sampling(40, temperature=0.7, seed=(5 << 40) + 9)


class Naive:
    """One drafter, made of modules of `transformers`."""

    def __init__(self, directory: Path, form: str) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig
        from transformers.models.llama import modeling_llama as llama

        self.form = form
        self.config = json.loads((directory / "config.json").read_text())
        self.target = AutoModelForCausalLM.from_pretrained(
            TARGET, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.tensors = {
            short_name(name): each
            for name, each in load_file(fitted_drafters.weights_of(directory)).items()
        }
        scaling = self.config.get("rope_scaling") or {"rope_type": "default"}
        config = LlamaConfig(
            **{name: self.config[name] for name in SAME},
            rope_parameters={**scaling, "rope_theta": self.config["rope_theta"]},
            attention_bias=form == "mtp",
        )
        config._attn_implementation = "sdpa"
        self.llama, self.llama_config = llama, config
        self.attention = llama.LlamaAttention(config, 0)
        if form == "eagle3":
            size = config.hidden_size
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = getattr(self.attention, name).weight.shape[0]
                setattr(self.attention, name, nn.Linear(2 * size, rows, bias=False))
        self.attention.o_proj = nn.Linear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=False
        )
        self.mlp, self.rotary = llama.LlamaMLP(config), llama.LlamaRotaryEmbedding(config)
        for module in (self.attention, self.mlp):
            names = list(module.state_dict())
            module.load_state_dict({n: self.tensors[n.removesuffix(".weight")] for n in names})

    def norm(self, name: str, x: Tensor) -> Tensor:
        module = self.llama.LlamaRMSNorm(x.shape[-1], self.config["rms_norm_eps"])
        module.weight.data = self.tensors[name]
        return module(x)

    def features(self, tokens: Sequence[int]) -> Tensor:
        states = []
        hooks = [
            layer.register_forward_hook(lambda *args: states.append(args[-1]))
            for layer in self.target.model.layers
        ]
        last = self.target.model(torch.tensor([list(tokens)]), use_cache=False).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        if self.form != "eagle3":
            return last
        ids = self.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        if ids is None:
            inputs = self.config.get("eagle_aux_hidden_state_layer_ids", [2, 2, 1])
            ids = [layer - 1 for layer in inputs]
        taps = [states[layer][0] for layer in ids]
        if "fc_norm.0" in self.tensors:
            taps = [self.norm(f"fc_norm.{i}", each) for i, each in enumerate(taps)]
        joined = torch.cat(taps, 1)
        if self.config.get("norm_before_fc"):
            joined = self.norm("input_norm", joined)
        return joined @ self.tensors["fc"].T

    def whole(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, what is fed back) of the last of these pairs, which stand in slots 1, 2, ..."""
        table = self.tensors.get("embed_tokens", self.target.model.embed_tokens.weight)
        embedded = table[torch.tensor(list(tokens))]
        if self.form == "eagle3":
            normed = self.norm("hidden_norm", features)
            x = torch.cat((self.norm("input_layernorm", embedded), normed), 1)
            residual = normed if self.config.get("norm_before_residual") else features
        elif self.form == "eagle":
            x = torch.cat((embedded, features), 1) @ self.tensors["fc"].T + self.tensors["fc.bias"]
            residual = x
        else:
            first = self.norm("hidden_layernorm", features)
            x = torch.cat((first, self.norm("token_layernorm", embedded)), 1)
            residual = x @ self.tensors["input_proj"].T
            x = self.norm("input_layernorm", residual)
        place = self.rotary(x[None], torch.arange(1, len(x) + 1)[None])
        attended, _ = self.attention(x[None], position_embeddings=place, attention_mask=None)
        hidden = residual + attended[0]
        hidden = hidden + self.mlp(self.norm("post_attention_layernorm", hidden))
        normed = hidden
        if self.form != "eagle":
            normed = self.norm("norm" if self.form == "eagle3" else "final_layernorm", hidden)
        head = self.tensors.get("lm_head", self.target.lm_head.weight)
        raw = self.form == "eagle3" and not self.config.get("norm_output")
        return normed[-1] @ head.T, (hidden if raw else normed)[-1]

    @torch.no_grad()
    def drafts(
        self, tokens: Sequence[int], length: int, width: int, sampling: Sampling
    ) -> list[int]:
        features, known = self.features(tokens[:length]), list(tokens[1 : length + 1])
        for position in range(length + 1, length + width):
            logits, fed_back = self.whole(known, features)
            if sampling.temperature:
                noise = gumbel_ref(
                    torch.tensor([sampling.seed]), torch.tensor([position]), VOCAB_SIZE
                )[0]
                d2t = self.tensors.get("d2t", torch.zeros(VOCAB_SIZE))
                at = [number + int(offset) for number, offset in enumerate(d2t)]
                logits = logits / sampling.temperature + noise[at]
            number = int(logits.argmax())
            known.append(number + int(self.tensors["d2t"][number] if "d2t" in self.tensors else 0))
            features = torch.cat((features, fed_back[None]))
        return known[length:]


SAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_drafts_equal_those_of_layers_that_compute_all_of_it_anew(
    name: str, tmp_path: Path
) -> None:
    form, options = CASES[name]
    fitted_drafters.write(tmp_path, TARGET, form, **options)
    reference, naive = ChainReference(TARGET, tmp_path), Naive(tmp_path, form)
    text = problem_ids(1)[0]
    torch.testing.assert_close(
        reference.features(text), naive.features(text).detach(), rtol=1e-4, atol=1e-4
    )
    found = {
        (length, sampling.seed): reference.drafts(text, length, WIDTH, sampling)
        for sampling in SAMPLINGS
        for length in (1, 2, 17, len(text) - 1)
    }
    for (length, seed), drafts in found.items():
        sampling = next(each for each in SAMPLINGS if each.seed == seed)
        assert drafts == naive.drafts(text, length, WIDTH, sampling)
    assert len({tuple(drafts) for drafts in found.values()}) > 4, "they tell nothing apart"
    if "d2t" in options:
        ids = set((torch.arange(300) + D2T).tolist())
        assert ids.issuperset(draft for drafts in found.values() for draft in drafts)


def test_draft_rows_and_tails_are_those_of_slots_and_pages(tmp_path: Path) -> None:
    fitted_drafters.write(tmp_path, TARGET, "eagle3")
    reference, naive = ChainReference(TARGET, tmp_path), Naive(tmp_path, "eagle3")
    text = problem_ids(1)[0][:21]
    ((keys, values),) = reference.draft_rows(text)
    assert keys.shape == values.shape == (21, fitted_drafters.KV_HEADS, 32)
    assert keys[0].isnan().all()
    assert values[0].isnan().all()
    seen: list[Tensor] = []
    naive.attention.v_proj.register_forward_hook(lambda *args: seen.append(args[-1]))
    with torch.no_grad():
        features = naive.features(text)
        naive.whole(text[1:], features[:-1])
    torch.testing.assert_close(values[1:].flatten(1), seen[0][0], rtol=1e-4, atol=1e-4)
    tails = reference.tails(text, 8)
    assert list(tails) == [0, 1, 2]
    for page, slot in ((0, 7), (1, 15), (2, 20)):
        torch.testing.assert_close(tails[page], features[slot], rtol=1e-4, atol=1e-4)


def test_three_conventions_tap_the_same_layers() -> None:
    inner = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}
    inputs = {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}
    assert [tapped_layers(each, 36) for each in (inner, inputs, {})] == [[1, 17, 32]] * 3


# A drafter that is told what to propose, and pages that are told what to hold.


Served: TypeAlias = tuple[list[Ask], list[Answer], ChainReference]


class Told:
    """Drafter of requests that are told apart by their seeds.

    Args:
        engine: a decode worker's.
        drafts: by seed, those behind each KV length of a text: [length, drafts].
    """

    def __init__(self, engine: Engine, drafts: dict[int, Tensor]) -> None:
        loaded = engine.runner.loaded
        self._columns, self._seeds, self._drafts = (
            loaded.state.columns,
            loaded.state.ints.seed,
            drafts,
        )
        object.__setattr__(loaded, "drafter", self)

    def observe(self, batch: Batch, hidden: Tensor) -> None: ...

    def seed(self, rows: Tensor) -> None: ...

    def advance(self, sampled: SampledRows, hidden: Tensor, drawn: Tensor, *, greedy: bool) -> None:
        for row, valid in zip(sampled.rows.tolist(), sampled.valid.tolist(), strict=True):
            if valid:
                table, length = self._drafts[int(self._seeds[row])], int(self._columns.seq_len[row])
                self._columns.drafts[row] = table[min(length, len(table) - 1)]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Served:
    """Requests that preempt each other, their answers, and a drafter that is fitted to them."""
    asked = [
        Ask(prompt, Sampling(24, temperature=(0.0, 0.8)[number % 2], seed=number), number)
        for number, prompt in enumerate(problem_ids(10))
    ]
    made = workers(num_tokens=FEW)
    answers = made.serve(asked)
    made.close()
    texts = [[*ask.prompt, *answer.tokens] for ask, answer in zip(asked, answers, strict=True)]
    directory = tmp_path_factory.mktemp("drafter")
    d2t = fitted_drafters.map_of(texts, 300, VOCAB_SIZE)
    fitted_drafters.write(directory, TARGET, "eagle3", d2t=d2t)
    fitted_drafters.fit(directory, TARGET, texts)
    return asked, answers, ChainReference(TARGET, directory)


def table_of(
    served: Served,
    wrong: Callable[[list[int], int], list[int]] = lambda drafts, length: drafts,
) -> dict[int, Tensor]:
    """Drafts of each text, by KV length."""
    found = {}
    for ask, answer in zip(*served[:2], strict=True):
        text = [*ask.prompt, *answer.tokens]
        table = torch.full((len(text), WIDTH - 1), -1)
        for length in range(len(ask.prompt), len(text)):
            drafts = served[2].drafts(text, length, WIDTH, ask.sampling)
            table[length] = torch.tensor(wrong(drafts, length))
        found[ask.sampling.seed] = table
    return found


def judged(
    served: Served,
    table: dict[int, Tensor],
    *,
    overlap: bool = True,
) -> Lockstep:
    asked, answers, reference = served
    made = workers(num_tokens=FEW, overlap=overlap, spec={"widths": [WIDTH]})
    Told(made.engines[DECODE], table)
    found = made.serve(asked)
    made.close()
    assert [each.tokens for each in found] == [each.tokens for each in answers]
    for number, (ask, answer) in enumerate(zip(asked, answers, strict=True)):
        text, max_len = [*ask.prompt, *answer.tokens], len(ask.prompt) + ask.sampling.max_tokens
        trace_is_right(made.windows[number], text, reference, ask.sampling, max_len)
    return made


@pytest.mark.parametrize("overlap", [True, *more(False)])
def test_traces_of_an_engine_that_is_told_its_drafts_are_right(
    overlap: bool, served: Served
) -> None:
    made = judged(served, table_of(served), overlap=overlap)
    assert value(made.engines[DECODE].metrics.preemptions) > 0
    windows = [window for each in made.windows.values() for window in each]
    steps = [window.num for window in windows if set(window.drafts) != {-1}]
    print(f"{sum(steps) / len(steps):.2f} of {WIDTH} tokens a step, {len(steps)} steps")
    assert set(steps) == set(range(1, WIDTH + 1))


def one_wrong(drafts: list[int], length: int) -> list[int]:
    return [*drafts[:-1], (drafts[-1] + 1) % VOCAB_SIZE] if length % 7 == 0 else drafts


def none_now_and_then(drafts: list[int], length: int) -> list[int]:
    return [-1] * len(drafts) if length % 7 == 0 else drafts


def one_less(drafts: list[int], length: int) -> list[int]:
    return [*drafts[:-1], -1] if length % 7 == 0 else drafts


@pytest.mark.parametrize("wrong", [one_wrong, none_now_and_then, one_less])
def test_a_trace_with_a_wrong_draft_is_found(
    wrong: Callable[[list[int], int], list[int]],
    served: Served,
) -> None:
    with pytest.raises(AssertionError, match="which were the likeliest"):
        judged(served, table_of(served, wrong))


def test_a_trace_with_drafts_at_its_entry_or_a_wrong_count_is_found(
    served: Served,
) -> None:
    asked, answers, reference = served
    windows = judged(served, table_of(served)).windows[0]
    text = [*asked[0].prompt, *answers[0].tokens]
    rest = reference, asked[0].sampling, len(text)
    assert trace_is_right(windows, text, *rest) > 0
    later = replace(windows[3], hold=object())
    with pytest.raises(AssertionError, match="entry"):
        trace_is_right([*windows[:3], later, *windows[4:]], text, *rest)
    few = replace(windows[3], num=windows[3].num % WIDTH + 1)
    with pytest.raises(AssertionError):
        trace_is_right([*windows[:3], few, *windows[4:]], text, *rest)


def test_pages_that_differ_from_the_reference_in_one_row_are_found(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, _, reference = served
    heads = {"num_kv_heads": fitted_drafters.KV_HEADS, "head_dim": fitted_drafters.HEAD_DIM}
    add_regions(monkeypatch, **heads)
    made = workers()
    made.serve(asked)
    engine = made.engines[DECODE]
    keys, values = engine.pool.layer(0, "draft")
    tail = engine.pool.page_rows("tail")
    known = list(prefixes(engine.book))
    for cache in (keys, values, tail):
        cache.fill_(float("nan"))
    for tokens, pages in known:
        (rows,), tails = reference.draft_rows(tokens), reference.tails(tokens, 16)
        for number, page in enumerate(pages):
            for cache, row in zip((keys, values), rows, strict=True):
                cache[page] = row[16 * number : 16 * number + 16].transpose(0, 1)
            tail[page] = tails[number]
    assert audit(engine, reference) == len({page for _, pages in known for page in pages}) > 10
    first, last = known[0][1][0], known[0][1][-1]
    for place in (keys[first, :, 1], values[last, :, 15], keys[last, 0, 7], tail[last]):
        before = place.clone()
        for wrong in (before * 1.001, before.flip(-1), before * float("nan")):
            place.copy_(wrong)
            with pytest.raises(AssertionError, match=r"^(draft|tail)"):
                audit(engine, reference)
        place.copy_(before)
    for shifted in (keys, values):
        shifted[last] = shifted[last].roll(1, 1)
        with pytest.raises(AssertionError, match=r"draft ."):
            audit(engine, reference)
        shifted[last] = shifted[last].roll(-1, 1)
    assert audit(engine, reference) > 10
    made.close()
