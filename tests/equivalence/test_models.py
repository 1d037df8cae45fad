"""Our models against `transformers`, same random weights, float32, through the paged pool."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.dense_families import DENSE, RANKED, SHORT, VISION
from tests.support.expert_families import DELTA as EXPERT_DELTA
from tests.support.pairwise import in_whole, one_in
from tests.support.processes import on_ranks
from worker.cache.layout import ModelLayout
from worker.cache.pool import KVPool
from worker.config import ModelConfig, WorkerConfig
from worker.config.checkpoint.delta_shape import block_table
from worker.config.checkpoint.experts import Division
from worker.config.checkpoint.shape import read_model_shape
from worker.errors import Unsupported
from worker.forward.batch import Batch, HostLengths, StateChunks, StateWindows
from worker.forward.context import forward_context
from worker.model.decoder import Decoder
from worker.model.kinds import Cut, regions_of
from worker.model.load import load_model
from worker.model.placement import Placement
from worker.peers.base import SingleCollective
from worker.start.build import _read_shape
from worker.weights.formats import format_of
from worker.weights.plain import PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = 1e-4  # absolute, on logits of about ±10
NUM_GREEDY = 32
PAGE_SIZE = 4
CPU = torch.device("cpu")
PROMPTS = [[5, 17, 101, 3, 9, 9, 54, 1, 77, 150, 2, 36, 8], [198, 4, 44, 23, 7]]
LLAMA3_ROPE = {  # wavelengths in all three bands
    "rope_type": "llama3", "rope_theta": 20000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
SHAPE = {  # an odd vocabulary: two ranks hold 100 rows each, one of them surplus
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
DELTA = EXPERT_DELTA | {"head_dim": 32, "linear_num_value_heads": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 32}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-next": ("Qwen3Next", {**DELTA, "linear_num_value_heads": 8, "num_experts": 0}),
    "qwen3-next-r1": (
        "Qwen3Next",
        {**DELTA, "mlp_only_layers": [0, 1, 2, 3], "linear_key_head_dim": 32},
    ),
    "qwen3.5": ("Qwen3_5", {**DELTA, "linear_num_value_heads": 12}),
    "qwen3.5-tied": (
        "Qwen3_5",
        {
            **DELTA,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention"] * 2,
        },
    ),
    **DENSE,
}


def save_random(path: Path, family: str, changes: dict[str, Any], **save: Any) -> torch.nn.Module:
    """A model of transformers with every weight random, norms and biases too, saved to `path`."""
    import transformers  # seconds, where these tests run only

    kind = (
        f"{family}TextConfig"
        if family in ("Qwen3_5", "Qwen3_5Moe", "Gemma3")
        else f"{family}Config"
    )
    config, made = getattr(transformers, kind)(**(SHAPE | changes)), f"{family}ForCausalLM"
    if family == "Gemma3" and config.tie_word_embeddings:  # of a model that sees images too
        config = transformers.Gemma3Config(text_config=config.to_dict(), vision_config=VISION)
        made = "Gemma3ForConditionalGeneration"
    config._attn_implementation = "eager"
    model = getattr(transformers, made)(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                centred = "linear_num_key_heads" in changes and "linear_attn" not in name
                centred |= family in ("Gemma2", "Gemma3", "Nemotron")
                weight.copy_(0.2 * noise + (not centred))
            elif "experts." in name:  # matrices, in a stack
                weight.copy_(0.2 * noise)
            else:
                weight.copy_(noise * (0.5, 0.5, 0.2, 1.0, 1.0)[weight.dim()])
    model.save_pretrained(path, **save)
    return model


@torch.inference_mode()
def expect(
    model: torch.nn.Module, prompt: list[int], ids: list[int]
) -> tuple[list[int], torch.Tensor]:
    """(greedy ids, logits [len(prompt) + len(ids) − 1, vocab]) of transformers.

    Each is the greedy id after those of `ids` before it: where all equal `ids`, these are greedy.
    """
    logits = model(torch.tensor([prompt + ids[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist(), logits


class Engine:
    """The least that can drive a model: fixed pages per request, chosen apart and out of order."""

    def __init__(
        self, model: Decoder, device: torch.device = CPU, dtype: str = "float32", kv_dtype: str = ""
    ) -> None:
        self.model, spec = model, model.shape
        num_pages, ranks = 1 + 2 * 12, (model.collective.size, model.collective.rank)
        pages, state = regions_of(spec, Cut(PAGE_SIZE, 1, dtype, kv_dtype or dtype))
        layout = ModelLayout((pages,), state).share(*ranks)
        self.pool = KVPool(layout, num_pages, device, (3, 0))
        self.columns = [torch.tensor([0, 2, 1]), *torch.zeros(2, 3, dtype=torch.int64)]
        model.keep(self.pool, 2, 1)
        for states in self.pool.states:
            states[0].fill_(float("nan"))
        names = {"prefill": "reference", "decode": "reference"}
        self.attention = model.attentions(names, self.pool, dtype).decode
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.pages = [order[:12].tolist(), order[12:].tolist()]

    @torch.inference_mode()
    def step(self, starts: list[int], tokens: list[list[int]]) -> list[torch.Tensor]:
        """Logits of every given token, per request; request i's stand at starts[i] and on."""
        spans = [range(s, s + len(t)) for s, t in zip(starts, tokens, strict=True)]
        slots = [
            pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE
            for pages, span in zip(self.pages, spans, strict=True)
            for p in span
        ]
        widths, device = [len(span) for span in spans], self.pool.device
        batch = Batch(
            input_ids=torch.tensor([t for ids in tokens for t in ids], device=device),
            positions=torch.tensor([p for span in spans for p in span], device=device),
            slot_mapping=torch.tensor(slots, device=device),
            query_start=torch.tensor([0, *widths], device=device).cumsum(0).int(),
            seq_lens=torch.tensor([span.stop for span in spans], device=device).int(),
            page_table=torch.tensor(self.pages, device=device).int(),
            num_reqs=len(spans),
            num_tokens=sum(widths),
            max_query_len=max(widths),
            max_seq_len_ub=max(span.stop for span in spans),
            host=HostLengths(widths, [span.stop for span in spans]),
        )
        if self.pool.states:
            batch = replace(batch, states=self.states(batch, spans))
        with forward_context(batch, self.attention, self.attention.plan(batch)):
            hidden = self.model.forward(self.model.embed(batch.input_ids), batch.positions)
        return list(self.model.logits(hidden).split(widths))

    def states(self, batch: Batch, spans: list[range]) -> StateWindows | StateChunks:
        """A token of each request alone is a decode step."""
        slots, folded, seq_len = self.columns
        rows, ends = torch.tensor([1, 2]), torch.tensor([span.stop for span in spans])
        if all(len(span) == 1 for span in spans):
            folded[rows] = seq_len[rows] = ends - 1
            return StateWindows(rows, slots, folded, seq_len, torch.zeros_like(slots), 1, 64)
        blocks = block_table(batch.query_start.tolist(), batch.num_tokens)
        table = torch.tensor(blocks, dtype=torch.int32)
        none = torch.zeros(len(rows), dtype=torch.int32)
        own = slots[rows].int()
        return StateChunks(batch.query_start, batch.seq_lens, own, none, none, table)

    def prefill(self, chunk: int) -> Iterator[list[torch.Tensor]]:
        """Both prompts together, `chunk` tokens of each at a time."""
        for start in range(0, max(map(len, PROMPTS)), chunk):
            parts = [prompt[start : start + chunk] for prompt in PROMPTS]
            starts = [min(start, len(prompt)) for prompt in PROMPTS]
            yield self.step(starts, parts)

    def run(self, chunk: int) -> list[tuple[list[int], torch.Tensor]]:
        """(NUM_GREEDY greedy ids, their logits and the prompt's) for each prompt.

        Chunked prefill, then token by token.
        """
        steps = list(self.prefill(chunk))
        logits = [torch.cat([step[i] for step in steps]) for i in range(len(PROMPTS))]
        ids = [[int(rows[-1].argmax())] for rows in logits]
        for n in range(NUM_GREEDY - 1):
            rows = self.step([len(p) + n for p in PROMPTS], [[out[-1]] for out in ids])
            for i, row in enumerate(rows):
                logits[i] = torch.cat((logits[i], row))
                ids[i].append(int(row[-1].argmax()))
        return list(zip(ids, logits, strict=True))


def load(
    path: Path,
    collective: Any = None,
    experts: Division = "auto",
    *,
    eight: bool = False,
    **options: Any,
) -> Decoder:
    """eight: matrices in eight bits stay so."""
    shape = read_model_shape(path).served(SHORT.get(path.name, "auto"))
    group, kept = collective or SingleCollective(), PLAIN
    if eight:
        kept = format_of(shape.quantization)
    placement = Placement(group, torch.float32, CPU, experts, kept)
    return load_model(path, shape, placement, **options)


def compared(
    reference: torch.nn.Module, path: Path, chunks: tuple[int, ...]
) -> Iterator[tuple[float, bool]]:
    """(largest difference of logits, whether the greedy ids are equal), by chunks and prompts."""
    for chunk in chunks:
        engine = Engine(load(path))
        for prompt, (ids, logits) in zip(PROMPTS, engine.run(chunk), strict=True):
            wanted_ids, wanted = expect(reference, prompt, ids)
            assert len(ids) == NUM_GREEDY
            assert logits.dtype == torch.float32
            assert logits.shape == wanted.shape
            yield float((logits - wanted).abs().max()), ids == wanted_ids
        engine.pool.close()


def assert_same(reference: torch.nn.Module, path: Path, chunks: tuple[int, ...]) -> None:
    for error, same in compared(reference, path, chunks):
        assert error < BOUND
        assert same


FIRST = {of: case for case, (of, _) in reversed(CASES.items())}.values()  # one of each class


@pytest.mark.parametrize("case", [*one_in(2, FIRST), *one_in(9, sorted(CASES.keys() - FIRST))])
def test_logits_and_greedy_ids_equal_transformers(case: str, tmp_path: Path):
    path = tmp_path / case
    assert_same(save_random(path, *CASES[case]), path, chunks=(64, 5))


def test_a_checkpoint_of_many_files_loads_through_its_index(tmp_path: Path):
    reference = save_random(tmp_path, "Qwen3", {"head_dim": 32}, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (tmp_path / "stray.safetensors").write_bytes(b"not named by the index, so never opened")
    assert_same(reference, tmp_path, chunks=(64,))


@torch.inference_mode()
def test_a_head_unlike_the_embedding_counts_though_config_json_ties_them(tmp_path: Path):
    from transformers import Qwen2ForCausalLM

    own = save_random(tmp_path, "Qwen2", {}).lm_head.weight.clone()
    edit(tmp_path, tie_word_embeddings=True)
    config = WorkerConfig(role="decode", model=ModelConfig(path=str(tmp_path)))
    shape = _read_shape(config)
    assert not shape.tie_word_embeddings
    model = load_model(tmp_path, shape, Placement(SingleCollective(), torch.float32, CPU))
    assert model.head.weight[: len(own)].equal(own)
    assert Qwen2ForCausalLM.from_pretrained(tmp_path).lm_head.weight.equal(own)
    held = load_file(tmp_path / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    assert _read_shape(config).tie_word_embeddings


def both(path: Path, collective: Any = None, **how: Any) -> list[tuple[list[int], torch.Tensor]]:
    """Of the saved weights for each prompt, and of noise for the first; how: as for `load`."""
    made = load(path, collective, **how), load(path, collective, noise=3, **how)
    saved, noise = (Engine(each).run(chunk=64) for each in made)
    return [*saved, noise[0]]


def assert_ranks_equal_one(num: int, path: Path, tmp_path: Path, **how: Any) -> None:
    expected = both(path, **how)
    for results in on_ranks(num, tmp_path, lambda group: both(path, group, **how)):
        for (ids, logits), (wanted_ids, wanted) in zip(results, expected, strict=True):
            assert ids == wanted_ids
            error = logits - wanted
            if how.get("eight"):
                assert error.norm() < 0.005 * num * wanted.norm(), "now and then a value tips"
            else:
                assert error.abs().max() < BOUND


RANKS = [2, *in_whole((4,))]


# KV heads that are divided, that are copied; an output bias.
@pytest.mark.parametrize("num", RANKS)
@pytest.mark.parametrize(
    "case",
    one_in(99, ["llama-mqa", "qwen2-tied", "llama-bias", "qwen3-next", "qwen3.5", *RANKED]),
)
def test_ranks_equal_one(case: str, num: int, tmp_path: Path):
    save_random(tmp_path / case, *CASES[case])
    assert_ranks_equal_one(num, tmp_path / case, tmp_path)


def edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures.*Mamba.*LlamaForCausalLM, MiMo"),
        ({"architectures": None}, "architectures: must be a list of one name"),
        ({"hidden_size": "absent"}, r"config\.json: hidden_size: missing"),
        ({"vocab_size": "many"}, r"config\.json: vocab_size: must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4"),
        ({"rope_parameters": {"rope_type": "xpos", "factor": 2}}, "rope_parameters.*xpos.*llama3"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters\.factor: missing"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types.*chunked"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"]},
            "layer_types: must name .* each of 3 layers",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act.*silu"),
    ],
)
def test_a_config_that_we_cannot_serve_names_file_and_field(tmp_path, changes, message):
    import transformers

    transformers.Qwen2Config(**SHAPE, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    read_model_shape(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        read_model_shape(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_weights_that_do_not_fit_are_named(tmp_path: Path):
    save_random(tmp_path, "Llama", {})
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    save_file(good | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file)
    load(tmp_path)
    bad = good | {"model.extra.weight": torch.ones(2)}
    del bad["model.norm.weight"]
    save_file(bad, file)
    message = r"missing tensors: model\.norm\.weight; unexpected tensors: model\.extra\.weight"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
    save_file(good | {"model.norm.weight": torch.ones(63)}, file)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(63,\).*\(64,\)"):
        load(tmp_path)
    file.write_bytes(b"torn")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors file"):
        load(tmp_path)


def test_ranks_that_do_not_divide_the_heads_are_refused(tmp_path: Path):
    save_random(tmp_path, "Llama", {})
    lone_rank = SingleCollective()
    lone_rank.size = 3
    with pytest.raises(Unsupported, match="4 attention heads cannot be divided among 3 ranks"):
        load(tmp_path, lone_rank)


def test_a_pass_reads_no_value_from_the_device(tmp_path: Path):
    """On the meta device any .item(), .tolist() or copy to the host raises."""
    save_random(tmp_path, *CASES["qwen3-bias"])
    meta = torch.device("meta")
    model = Decoder(read_model_shape(tmp_path), Placement(SingleCollective(), torch.bfloat16, meta))
    logits = torch.cat(Engine(model, meta, "bfloat16").step([1, 0], [[5, 6], [7, 8, 9]]))
    assert (logits.shape, logits.dtype) == ((5, 199), torch.bfloat16)
