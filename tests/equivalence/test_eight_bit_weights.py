"""Weights that stay in eight bits are those of the files, and what serves them changes nothing.

Against itself, not against `transformers`, which computes with other activations.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import worker.weights.eight_bits
from tests.equivalence import test_dense_laws as dense_laws
from tests.equivalence import test_models as models
from tests.equivalence import test_mtp as mtp
from tests.equivalence.test_eight_bit_kv import WAYS, mean_kl
from tests.equivalence.test_hybrid_mutants import mutate
from tests.equivalence.test_quantized_files import FORMS, published
from tests.support.pairwise import in_whole, one_in
from tests.support.places import place
from worker.config import ModelConfig, SpecConfig
from worker.config.checkpoint.experts import ExpertShape, Held
from worker.config.checkpoint.quantization import SCALE_BLOCK as BLOCK
from worker.config.checkpoint.quantization import Quantization
from worker.config.checkpoint.shape import read_model_shape
from worker.drafts.chain import ChainDrafter
from worker.drafts.drafter_config import read_chain_shape
from worker.errors import UserError
from worker.model.decoder import Decoder
from worker.ops.experts import product as experts
from worker.ops.experts.route import new_load, route
from worker.ops.scaled import E4M3
from worker.start.check import _divided_widths, check_directories
from worker.weights import shard
from worker.weights.base import Matrix, Parts
from worker.weights.eight_bits import GRAIN, EightBitMatrix, EightBits, as_e4m3
from worker.weights.shard import Part, all_of

# Blocks that are a part, and columns that two ranks divide between blocks.
SIZES = {
    "vocab_size": 200, "hidden_size": 192, "intermediate_size": 512, "head_dim": 64,
    "num_hidden_layers": 2,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", SIZES),
    "odd": ("Qwen3", SIZES | {"intermediate_size": 168}),  # rows that no step of 16 divides
    "phi3": (  # one tensor of q, k and v, one of gate and up
        "Phi3",
        {"hidden_size": 256, "intermediate_size": 512, "pad_token_id": 0, "num_hidden_layers": 1},
    ),
    "glm": ("Glm4", SIZES | {"pad_token_id": 0}),  # rows of heads that are moved
    "experts": (
        "Qwen3Moe",
        {**SIZES, "hidden_size": 192, "moe_intermediate_size": 128, "num_experts": 4,
         "num_experts_per_tok": 2, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "wide": (  # for four ranks
        "Qwen3Moe",
        {**SIZES, "head_dim": 128, "hidden_size": 256, "moe_intermediate_size": 512,
         "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    ),
    "latent": (  # matrices of queries and latents as one, a last block that is a part
        "DeepseekV3",
        {"vocab_size": 200, "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 128,
         "kv_lora_rank": 176, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
         "n_group": 2, "topk_group": 1, "n_shared_experts": 2},
    ),
    "joined": (  # without a gate
        "DeepseekV3",
        {"intermediate_size": 128, "hidden_size": 192, "num_attention_heads": 4,
         "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 128,
         "kv_lora_rank": 176, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
         "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    ),
    "shared": (  # in one stack with the others
        "Qwen3Next",
        {**models.DELTA, "hidden_size": 192, "intermediate_size": 256, "head_dim": 64,
         "linear_num_value_heads": 4, "linear_value_head_dim": 64, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 128,
         "shared_expert_intermediate_size": 128},
    ),
    "gated": (  # a gate in q_proj, delta nets
        "Qwen3Next",
        {**models.DELTA, "hidden_size": 192, "intermediate_size": 256, "num_experts": 0,
         "head_dim": 64, "linear_num_value_heads": 4, "linear_value_head_dim": 64},
    ),
}  # fmt: skip
HYBRID = KINDS["gated"][1] | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread", "multiplied")


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, where weights would become f32 for speed."""
    monkeypatch.setattr(worker.weights.eight_bits, "multiplies_eight_bits", lambda _: True)


@cache
def saved(kind: str = "qwen3", form: str = "fp8") -> Path:
    """A directory in such a form."""
    path = place("eight") / f"{kind}-{form}"
    models.save_random(path, *KINDS[kind])
    published(path, form)
    return path


def worth(matrix: Any) -> torch.Tensor:
    *_, rows, columns = matrix.values.shape
    scales = matrix.scales.repeat_interleave(rows // matrix.scales.shape[-2], -2)
    if scales.shape[-1] > 1:
        scales = scales.repeat_interleave(BLOCK, -1)[..., :columns]
    return matrix.values.float() * scales


def is_eight(matrix: Any) -> bool:
    return matrix.values.dtype == E4M3


def linears(model: torch.nn.Module) -> dict[str, Any]:
    """Matrices by the names of their layers; those of experts are stacks."""
    found = {name: each for name, each in model.named_modules() if isinstance(each, Matrix)}
    return {name.removesuffix(".weight"): each for name, each in found.items()}


@pytest.mark.product(kind=tuple(KINDS), form=tuple(FORMS))
def test_matrices_are_worth_what_the_files_are(kind: str, form: str) -> None:
    """Against the weights in f32, whose oracle is transformers (test_quantized_files)."""
    path = saved(kind, form)
    stay, whole = linears(models.load(path, eight=True)), linears(models.load(path))
    kept = {name for name, each in stay.items() if is_eight(each)}
    assert {name for name in stay if "inputs" not in name} == kept, "all but a delta net's inputs"
    for name in kept:
        wanted = whole[name].values
        shared = name.replace("feed_forward", "feed_forward.shared")
        if shared in whole and shared not in stay:  # in one stack with the others
            wanted = torch.cat((wanted, whole[shared].values[None]))
        assert torch.equal(worth(stay[name]), wanted), name


def test_products_read_scales_that_lie_once_for_a_block() -> None:
    """Made as a model is loaded, at one address; a product of some rows reads some of them."""
    settled = 0
    for name, each in linears(models.load(saved("phi3"), eight=True)).items():
        assert (each.of_blocks is not None) == each.whole_blocks, name
        if each.of_blocks is None:
            continue
        settled, once = settled + 1, each.of_blocks
        assert torch.equal(once.repeat_interleave(BLOCK // GRAIN, 0), each.scales), name
        x = torch.randn(3, each.values.shape[1], generator=torch.Generator().manual_seed(1))
        some, whole = each.product(x, first_row=BLOCK), each.product(x)
        assert torch.equal(some, whole[:, BLOCK:]), name
        each.of_blocks = None
        assert torch.equal(each.product(x), whole), name
    assert settled


def test_experts_are_those_of_what_they_are_worth() -> None:
    """Of stacks whose scales differ by far, also from expert to expert."""
    generator = torch.Generator().manual_seed(5)
    x, gate = (torch.randn(n, 192, generator=generator) for n in (40, 4))
    shape, held, stacks = ExpertShape(4, 2, 128, renormalizes=True), Held(0, 4), []
    for size, *sizes in ((1.0, 256, 192), (30.0, 192, 128)):
        drawn = torch.randn(4, *sizes, generator=generator) * size / sizes[-1] ** 0.5
        drawn *= torch.tensor([1.0, 8.0, 0.2, 3.0]).view(-1, 1, 1)
        rows, columns = map(all_of, sizes)
        parts = Parts({"": rows}, columns, held=held)
        made = EightBitMatrix(EightBits(Quantization("e4m3", BLOCK)), parts, empty)
        values, scales = as_e4m3(drawn, (4, sizes[0] // GRAIN, -(-sizes[1] // BLOCK)))
        made.values.copy_(values)
        made.scales.copy_(scales)
        stacks.append(made)
    routes = route(x, gate, None, 0, shape, held, new_load(held, torch.device("cpu")))
    up, down = stacks
    found = up.experts(down, x, routes)
    wanted = experts.expert_products(x, routes, worth(up), worth(down), held)
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.06


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def test_what_the_files_leave_alone_is_left_alone(tmp_path: Path) -> None:
    assert Quantization("e4m3", BLOCK, ("model.layers.0.mlp",)).takes(
        "model.layers.0.self_attn.q_proj"
    )
    assert not Quantization("e4m3", BLOCK, ("model.layers.0.mlp",)).takes(
        "model.layers.0.mlp.up_proj"
    )
    assert Quantization("e4m3", BLOCK, ("model.layers.1",)).takes("model.layers.11.mlp.up_proj")
    assert not Quantization("e4m3", BLOCK, ("up_proj",)).takes("model.layers.1.mlp.up_proj")
    assert not Quantization("e4m3", BLOCK, (r"re:.*\.mlp\..*",)).takes("model.layers.1.mlp.up_proj")
    shutil.copytree(saved(), tmp_path / "model")
    wrong = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    models.edit(tmp_path / "model", quantization_config=wrong | {"modules_to_not_convert": "gate"})
    with pytest.raises(UserError, match="modules_to_not_convert: must be a list of names"):
        models.load(tmp_path / "model")
    for ignored, kind, alone in (
        ("model.layers.0.mlp.gate_up_proj", "phi3", "layers.0.feed_forward.gate_up"),
        ("model.layers.0.mlp.down_proj", "phi3", "layers.0.feed_forward"),
        ("model.layers.0.self_attn.qkv_proj", "phi3", "layers.0.attention.qkv"),
        (r"re:.*\.experts\.3\.down_proj", "experts", "layers.1.feed_forward"),
    ):
        path = shutil.copytree(saved(kind, "block"), tmp_path / alone)
        form = json.loads((path / "config.json").read_text())["quantization_config"]
        models.edit(path, quantization_config=form | {"ignore": [ignored]})
        model = models.load(path, eight=True)
        assert not stepped(model)[0].isnan().any()
        found = linears(model)
        plain = {name for name, each in found.items() if not is_eight(each)}
        assert {name.removesuffix(".down").removesuffix(".gate_up") for name in plain} == {
            alone.removesuffix(".gate_up")
        }, ignored
    left = wrong | {"modules_to_not_convert": ["lm_head", "model.layers.1.self_attn.q_proj"]}
    models.edit(tmp_path / "model", quantization_config=left)
    held = linears(models.load(tmp_path / "model", eight=True))
    plain = {name for name, each in held.items() if not is_eight(each)}
    assert plain == {"layers.1.attention.qkv"}, "with what is computed beside it"


def test_a_file_in_another_dtype_than_its_config_says_is_named(tmp_path: Path) -> None:
    models.save_random(tmp_path, *KINDS["qwen3"])
    models.edit(tmp_path, quantization_config=FORMS["fp8"][0])
    with pytest.raises(UserError, match=r"_proj\.weight is F32, config\.json says F8_E4M3"):
        models.load(tmp_path, eight=True)
    for form, config in (("fp8", FORMS["channel"][0]), ("channel", FORMS["fp8"][0])):
        shutil.copytree(saved("qwen3", form), tmp_path / form)
        models.edit(tmp_path / form, quantization_config=config)
        with pytest.raises(UserError, match=r"config\.json says otherwise"):
            models.load(tmp_path / form, eight=True)


def test_a_part_is_counted_in_blocks() -> None:
    assert shard.coarse(Part(500, slice(256, 500)), BLOCK) == Part(4, slice(2, 4))
    assert shard.coarse(Part(500, slice(128, 256)), BLOCK) == Part(4, slice(1, 2))


def stepped(model: Decoder) -> list[torch.Tensor]:
    """Logits of a step of two prompts, and what its taps hold."""
    engine = models.Engine(model)
    taps = engine.model.tap((0, 1), 64)
    logits = engine.step([0, 0], [*models.PROMPTS])
    engine.pool.close()
    return [*logits, taps.rows(sum(map(len, models.PROMPTS))).clone()]


NORMS = [("qwen3", "add_norm"), ("shared", "add_norm_both")]


@pytest.mark.parametrize(("kind", "way"), NORMS)
def test_a_norm_that_quantises_leaves_what_one_leaves_that_does_not(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.load(saved(kind), eight=True)
    assert model.layers[0].post_norm._add_norm is getattr(EightBitMatrix, way)
    found = stepped(model)
    monkeypatch.setattr(EightBitMatrix, way, None)
    assert all(map(torch.equal, found, stepped(models.load(saved(kind), eight=True))))


@pytest.mark.whole  # of other models: test_dense_laws.py
@pytest.mark.filterwarnings(r"ignore:::torch\.")  # of Dynamo
def test_traced_layers_are_those_of_eager() -> None:
    dense_laws.check_traced(saved())


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("experts", "fp8"),
        *in_whole(("qwen3", "fp8"), ("phi3", "channel"), ("phi3", "fp8"), ("gated", "block")),
        *in_whole(("experts", "channel"), ("latent", "fp8"), ("latent", "channel")),
        *in_whole(("wide", "fp8"), ("wide", "channel")),
    ],
)
def test_ranks_equal_one(kind: str, form: str, tmp_path: Path) -> None:
    num = 4 if kind == "wide" else 2
    models.assert_ranks_equal_one(num, saved(kind, form), tmp_path, eight=True)


def test_ranks_that_would_share_a_block_are_refused_by_name() -> None:
    model = ModelConfig(path=str(saved("odd")))
    check_directories(model, SpecConfig(), {"prefill.engine.tensor_parallel": (1, "auto")})
    ranks: Any = {"prefill.engine.tensor_parallel": (2, "auto")}
    with pytest.raises(UserError, match=r"prefill\.engine\.tensor_parallel: .* of 168 .* fewer"):
        check_directories(model, SpecConfig(), ranks)
    shape = read_model_shape(saved("gated"))
    assert shape.delta is not None
    sparse = replace(
        shape, intermediate_size=5472, experts=ExpertShape(8, 2, 256, True, 384),
        is_sparse=(True,) * shape.num_layers,
    )  # fmt: skip
    widths = {*_divided_widths(sparse)}
    assert widths == {shape.num_heads * shape.head_dim, 384, shape.delta.value_width}


@cache
def alone(kind: str, form: str) -> list[list[int]]:
    return served(kind, form, "here")


def served(
    kind: str, form: str, way: str, kv_dtype: str = "auto", dtype: str = "float32", **engine: Any
) -> list[list[int]]:
    config = WAYS[way].copy()
    if kind == "gated" and "max_prefill_tokens" in config:
        config["max_prefill_tokens"] = 64  # a delta net's block
    return dense_laws.served(saved(kind, form), config, kv_dtype, dtype, **engine)


@cache
def with_mtp(*left: str) -> Path:
    """A hybrid with experts and an MTP layer in eight bits, but for what is below `left`."""
    path = place("eight") / f"mtp-{len(left)}"
    mtp.save_mtp(path, "Qwen3_5Moe", HYBRID)
    published(path, "fp8", left=left)
    return path


# As Qwen3.5 MoE is published in eight bits, as copies with experts alone in those, and without.
LEFT = ((), ("mtp.layers.0.self_attn", "mtp.layers.0.mlp.shared_expert"), ("mtp",))


@pytest.mark.parametrize("left", one_in(3, [(each,) for each in LEFT]), ids=str)
def test_an_mtp_layer_is_worth_what_its_files_are(left: tuple[str, ...], monkeypatch) -> None:
    path = with_mtp(*left)

    def read(*, eight: bool) -> dict[str, Any]:
        monkeypatch.setattr(worker.weights.eight_bits, "multiplies_eight_bits", lambda _: eight)
        target = models.load(path)
        drafter = ChainDrafter(read_chain_shape(path, target.shape), target, 64)
        drafter.fill(path)
        return linears(drafter)

    stay, whole = read(eight=True), read(eight=False)
    kept = {name for name, each in stay.items() if is_eight(each)}
    experts, others = {"feed_forward.gate_up", "feed_forward.down"}, {"attention.qkv"}
    assert (experts <= kept, others <= kept) == (left != LEFT[2], left == LEFT[0])
    for name, each in stay.items():
        assert torch.equal(worth(each) if name in kept else each.values, whole[name].values), name


WITH_MTP = {"drafter": "mtp", "widths": [4]}


@pytest.mark.parametrize("way", ["here", *in_whole(("pulled, two ranks, ngram",), ("preempted",))])
@pytest.mark.parametrize("left", [LEFT[0], *in_whole(*((each,) for each in LEFT[1:]))], ids=len)
def test_an_mtp_layer_in_eight_bits_changes_nothing(left: tuple[str, ...], way: str) -> None:
    path, how = with_mtp(*left), WAYS[way] | {"max_prefill_tokens": 64}
    plain = dense_laws.served(path, WAYS["here"] | {"max_prefill_tokens": 64}, num=2)
    assert dense_laws.served(path, how | WITH_MTP, num=2) == plain


SHORT = ("preempted", "pulled, two ranks, ngram")
REST = [(way,) for way in WAYS if way not in (*SHORT, "here") and "four" not in way]


@pytest.mark.parametrize("way", one_in(9, [*SHORT[::-1], *REST]))
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("experts", "fp8"),
        *in_whole(("qwen3", "fp8"), ("phi3", "channel"), ("gated", "block"), ("latent", "fp8")),
    ],
)
def test_whatever_serves_a_request_changes_nothing(kind: str, form: str, way: str) -> None:
    assert served(kind, form, way) == alone(kind, form)


def test_with_kv_in_eight_bits_too() -> None:
    both = [served("qwen3", "fp8", way, "float8_e4m3fn") for way in ("here", "pulled")]
    assert both[0] == both[1]


@pytest.mark.parametrize("name", one_in(2, ["tiny", "tiny-hybrid"]))
def test_a_bundled_model_says_nearly_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean KL of the next token's distribution over problems with their answers, in nats."""
    monkeypatch.setattr(models, "PAGE_SIZE", 16)
    source, path = ModelConfig(path=name).directory, place("eight") / name
    shutil.copytree(source, path)
    published(path, "fp8")
    kl = mean_kl(
        lambda: models.Engine(models.load(source)),
        lambda: models.Engine(models.load(path, eight=True)),
    )
    print(f"{name}: mean KL {kl:.2g} nats")
    assert 0 < kl <= 0.02


@pytest.mark.parametrize(
    ("where", "old", "new"),
    one_in(
        12,
        [
            ("ops.scaled:eight_bits_ref", "amax * (1 / E4M3_MAX)", "inverse"),
            ("ops.scaled:eight_bits_ref", "blocks.abs().amax(-1)", "blocks.amax(-1)"),
            ("ops.scaled:eight_bits_ref", ".amax(-1)", ".amax((0, 2)).expand(m, -1)"),
            ("ops.scaled:scaled_product_ref", "of_weights[:, block]", "of_weights[:, 0]"),
            ("ops.scaled:scaled_product_ref", "of_rows[:, block, None]", "of_rows[:, :1]"),
            ("weights.scaled_files:Scaled.scales", "-(-tall // each)", "1"),
            ("weights.shard:coarse", "slice(start // grain", "slice(0"),
            ("weights.base:Matrix.shards", "coarse(part, grid.grain)", "part"),
            ("weights.eight_bits:EightBitMatrix.add_norm", "eps, total)\n", "eps)\n"),
            (
                "weights.eight_bits:EightBitMatrix.add_norm_both",
                "x.dtype, normed",
                "x.dtype, added",
            ),
            ("weights.scaled_files:ScaledFormat.part", "stored.values", "stored"),
            ("weights.base:Matrix.shards", "tensor[number]", "tensor[0]"),
            ("ops.experts.product:expert_products_ref", "down, scales[1]", "down, scales[0]"),
        ],
    ),
)
def test_a_mutant_is_red(
    where: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.unit import test_scaled_products as products

    mutate(monkeypatch, where, old, new)
    laws: list[Callable[[], None]] = [
        test_a_part_is_counted_in_blocks,
        lambda: products.test_each_row_and_block_is_rounded_by_a_scale_of_its_own(384),
        products.test_a_row_depends_on_no_other_row,
        lambda: products.test_a_product_is_near_that_of_what_the_weights_are_worth(
            9, 48, 200, "blocks"
        ),
        *(
            partial(
                test_a_norm_that_quantises_leaves_what_one_leaves_that_does_not, *each, monkeypatch
            )
            for each in NORMS
        ),
        lambda: test_matrices_are_worth_what_the_files_are("qwen3", "fp8"),
        lambda: test_matrices_are_worth_what_the_files_are("experts", "fp8"),
        lambda: test_ranks_equal_one("qwen3", "fp8", tmp_path),
        lambda: test_experts_are_those_of_what_they_are_worth(),
    ]
    with pytest.raises((AssertionError, RuntimeError, IndexError)):  # noqa: PT012 - whichever
        for law in laws:
            law()
