"""Published chain drafters: how their directories are read, loaded and computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.chain_checkpoints import ABSENT, FORMS, write_chain
from worker.attention.base import AttentionShape
from worker.attention.reference import ReferenceAttention
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.drafts.chain_config import read_chain_spec
from worker.drafts.chain_model import ChainDrafter
from worker.errors import Unsupported, UserError
from worker.forward.batch import Batch
from worker.forward.context import forward_context
from worker.model.decoder import Decoder
from worker.model.loader import fill_drafter, load_model
from worker.model.shape import ModelSpec, read_model_spec
from worker.model.weights import Placement
from worker.ops.mask import KeyMask
from worker.peers.single import SingleCollective
from worker.start.digest import model_digest, part_sums, weights_digest

CPU = torch.device("cpu")
TARGET = ModelSpec(
    architecture="Qwen2ForCausalLM",
    hidden_size=32,
    num_layers=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=97,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    attention_bias=False,
    qk_norm=False,
    max_position_embeddings=64,
    dtype="float32",
    eos_token_ids=(0,),
    penalizes=False,
)
IDS = "eagle_aux_hidden_state_layer_ids"
REDUCED = {"draft_vocab_size": 40}
# What of each form can be set, all of it somewhere.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "specforge": ("specforge", REDUCED),
    "specforge-full": ("specforge", {}),
    "specforge-prefixed": ("specforge", {**REDUCED, "prefix": "model.", "own": ("embed_tokens",)}),
    "specforge-own": ("specforge", {"own": ("embed_tokens", "lm_head"), "norm_before_fc": True}),
    "specforge-3.1": (
        "specforge",
        {
            **REDUCED,
            "own": ("t2d",),
            "fc_norm": True,
            "norm_output": True,
            "eagle_config": {"return_hidden_post_norm": True, IDS: [0, 3, 6, 9]},
        },
    ),
    "specforge-early-3.1": (
        "specforge",
        {"norm_output": True, "eagle_config": {"return_hidden_post_norm": False}},
    ),
    "specforge-one": ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}),
    "specforge-bias": ("specforge", {"layer": {"attention_bias": True, "head_dim": 16}}),
    "specforge-narrow": (
        "specforge",
        {
            **REDUCED,
            "own": ("embed_tokens",),
            "layer": {"hidden_size": 24, "intermediate_size": 40},
            "target_hidden_size": 32,
        },
    ),
    "speculators": ("speculators", {**REDUCED, "own": ("embed_tokens", "t2d")}),
    "speculators-normed": (
        "speculators",
        {**REDUCED, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    ),
    "speculators-qwen3": (
        "speculators",
        {
            "draft_vocab_size": None,
            IDS: [2, 5],
            "layer": {
                "model_type": "qwen3",
                "tie_word_embeddings": True,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
        },
    ),
    "eagle": ("eagle", {}),
    "eagle-plain": ("eagle", {"bias": False, "own": ("embed_tokens",), "prefix": "model."}),
    "mimo": ("mimo", {}),
}


@pytest.fixture(scope="module")
def target() -> Decoder:
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "load_format": "dummy"}
    return load_model(Path(), TARGET, SingleCollective(), **options)


def load(path: Path, target: Decoder, **options: Any) -> ChainDrafter:
    spec = read_chain_spec(path, TARGET)
    drafter = ChainDrafter(
        spec, target, SingleCollective(), max_positions=64, device=CPU, dtype=torch.float32
    )
    fill_drafter(drafter, path, **options)
    return drafter


def weights(path: Path) -> Path:
    (file,) = path.glob("*.safetensors")
    return file


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Make `change` to config.json."""
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Make `change` to the tensors."""
    tensors = load_file(weights(path))
    change(tensors)
    save_file(tensors, weights(path))


# Loading


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_used_and_one_more_or_less_is_an_error(
    case: str, tmp_path: Path, target: Decoder
) -> None:
    form, flags = CASES[case]
    tensors = write_chain(tmp_path, form, TARGET, **flags)
    drafter = load(tmp_path, target)
    shards = drafter.shards()
    assert shards.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(shards[name].dest, tensor), name
    own = flags.get("own", ())
    assert (drafter.embedding is target.embedding) == ("embed_tokens" not in own)
    assert (drafter.head is target.head) == ("lm_head.weight" not in tensors)

    more = "model.mtp_layers.0.extra" if form == "mimo" else "extra"
    rewrite(tmp_path, lambda held: held.update({f"{more}.weight": torch.ones(2)}))
    with pytest.raises(UserError, match=f"unexpected tensors: {more}.weight"):
        load(tmp_path, target)
    for name in ("d2t", *(each for each in tensors if "fc" in each), next(iter(tensors))):
        if name in tensors:
            save_file({k: v for k, v in tensors.items() if k != name}, weights(tmp_path))
            with pytest.raises(
                UserError, match=f"missing tensors: .*{name.removeprefix('model.')}"
            ):
                load(tmp_path, target)


def test_a_layer_is_found_by_the_name_that_either_project_gives_it(
    tmp_path: Path, target: Decoder
) -> None:
    expected = write_chain(tmp_path, "specforge", TARGET, **REDUCED)

    def rename(tensors: dict[str, Tensor]) -> None:
        """Everything behind "model.", the head and the tables too."""
        for name in list(tensors):
            tensors[f"model.{name}".replace("midlayer", "layers.0")] = tensors.pop(name)

    rewrite(tmp_path, rename)
    shards = load(tmp_path, target).shards()
    assert len(shards) == len(expected)
    assert torch.equal(
        shards["model.layers.0.hidden_norm.weight"].dest, expected["midlayer.hidden_norm.weight"]
    )
    assert torch.equal(shards["model.d2t"].dest, expected["d2t"])


def test_ids_are_the_target_s(tmp_path: Path, target: Decoder) -> None:
    tensors = write_chain(tmp_path, "specforge", TARGET, own=("t2d",), **REDUCED)
    id_map = load(tmp_path, target).id_map
    assert id_map is not None
    assert id_map.dtype == torch.int64
    assert id_map.tolist() == tensors["t2d"].nonzero().flatten().tolist()
    write_chain(tmp_path / "full", "specforge", TARGET)
    assert load(tmp_path / "full", target).id_map is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["d2t"][-1].add_(97), "ids beyond the target's 97"),
        (lambda tensors: tensors["d2t"][0].fill_(-1), "ids beyond the target's 97"),
        (lambda tensors: tensors["d2t"][3].copy_(tensors["d2t"][4] + 1), "ascending"),
        (lambda tensors: tensors["t2d"].logical_not_(), "t2d and d2t name different ids"),
    ],
)
def test_ids_that_cannot_be_are_refused(
    change: Any, message: str, tmp_path: Path, target: Decoder
) -> None:
    write_chain(tmp_path, "specforge", TARGET, own=("t2d",), **REDUCED)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message):
        load(tmp_path, target)


@pytest.mark.parametrize("case", CASES)
def test_noise_needs_no_weights_and_has_norms_near_one(
    case: str, tmp_path: Path, target: Decoder
) -> None:
    form, flags = CASES[case]
    write_chain(tmp_path, form, TARGET, **flags)
    weights(tmp_path).unlink()
    drafter, again, other = (load(tmp_path, target, load_format="dummy", seed=s) for s in (1, 1, 2))
    for name, shard in drafter.shards().items():
        assert torch.equal(shard.dest, again.shards()[name].dest)
        if shard.dest.is_floating_point():
            assert not torch.equal(shard.dest, other.shards()[name].dest)
        if shard.dest.dim() == 1 and "norm" in name:
            assert abs(float(shard.dest.mean()) - 1) < 0.2, name
    if drafter.id_map is not None:
        assert drafter.id_map.tolist() == [i * 97 // 40 for i in range(40)]


def test_a_target_takes_no_notice_of_the_drafter_in_its_files(
    tmp_path: Path, target: Decoder
) -> None:
    """MiMo's own directory, whose layers are Qwen2's."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 97, "rms_norm_eps": 1e-6,
                "max_position_embeddings": 64, "eos_token_id": 0,
            }
        )
    )  # fmt: skip
    save_file(
        {name: shard.dest.contiguous() for name, shard in target.shards().items()},
        tmp_path / "model.safetensors",
    )
    tensors = write_chain(tmp_path, "mimo", TARGET)
    spec = read_model_spec(tmp_path)
    assert spec == replace(
        TARGET, architecture="MiMoForCausalLM", attention_bias=True, dtype=spec.dtype
    )
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float32}
    whole = load_model(tmp_path, spec, SingleCollective(), **options)
    assert weights_digest(part_sums(whole.shards())) == weights_digest(part_sums(target.shards()))

    def load_drafter() -> ChainDrafter:
        drafts = read_chain_spec(tmp_path, spec)
        one = SingleCollective()
        drafter = ChainDrafter(drafts, whole, one, max_positions=64, **options)
        fill_drafter(drafter, tmp_path)
        return drafter

    assert load_drafter().shards().keys() == tensors.keys()
    del tensors["model.mtp_layers.0.final_layernorm.weight"]
    save_file(tensors, tmp_path / "mtp.safetensors")
    with pytest.raises(UserError, match=r"missing tensors: model\.mtp_layers\.0\.final_layernorm"):
        load_drafter()


def test_a_drafter_s_digest_covers_flags_weights_and_ids(tmp_path: Path, target: Decoder) -> None:
    def digest() -> str:
        drafter = load(tmp_path, target)
        return model_digest(drafter.spec, weights_digest(part_sums(drafter.shards())))

    write_chain(tmp_path, "specforge", TARGET, own=("t2d",), **REDUCED)
    digests = [digest()]
    assert digest() == digests[0]
    edit(tmp_path, lambda config: config.update(norm_before_residual=True))
    digests.append(digest())
    edit(tmp_path, lambda config: config.update({"eagle_config": {IDS: [1, 2, 3]}}))
    digests.append(digest())

    def other_id(tensors: dict[str, Tensor]) -> None:
        ids = torch.arange(40) + tensors["d2t"]
        i = next(i for i in range(39) if ids[i + 1] > ids[i] + 1)
        tensors["d2t"][i] += 1
        tensors["t2d"][ids[i]], tensors["t2d"][ids[i] + 1] = False, True

    rewrite(tmp_path, other_id)
    digests.append(digest())
    rewrite(tmp_path, lambda tensors: tensors["fc.weight"][3, 3].neg_())
    digests.append(digest())
    assert len(set(digests)) == len(digests)


# Reading


@pytest.mark.parametrize(
    ("form", "fields", "taps"),
    [
        ("specforge", {"eagle_config": {IDS: [1, 4, 6]}}, (1, 4, 6)),
        ("specforge", {IDS: [2, 5, 7]}, (1, 4, 6)),
        ("specforge", {}, (1, 4, 6)),
        ("specforge", {"eagle_config": {IDS: []}}, (1, 4, 6)),
        ("specforge", {"eagle_config": {IDS: [1, 4, 6]}, IDS: [2, 5, 7]}, (1, 4, 6)),
        ("speculators", {IDS: [2, 5, 7]}, (1, 4, 6)),
        ("speculators", {}, (1, 4, 6)),
        ("specforge", {"eagle_config": {IDS: [0, 9]}}, (0, 9)),
        ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}, (10,)),
        ("eagle", {}, (10,)),
        ("mimo", {}, (10,)),
    ],
)
def test_all_ways_to_name_the_tapped_layers_mean_the_same(
    form: str, fields: dict[str, Any], taps: tuple[int, ...], tmp_path: Path
) -> None:
    write_chain(tmp_path, form, TARGET, **fields)
    spec = read_chain_spec(tmp_path, TARGET)
    assert spec.taps == taps
    assert spec.num_features == len(taps)


def test_what_is_fed_back_follows_the_field_of_one_meaning(tmp_path: Path) -> None:
    def fed_back(**fields: Any) -> bool:
        write_chain(tmp_path, "specforge", TARGET, **fields)
        return read_chain_spec(tmp_path, TARGET).norm_output

    said: dict[bool, dict[str, Any]] = {
        value: {"eagle_config": {"return_hidden_post_norm": value}} for value in (False, True)
    }
    assert not fed_back()
    assert fed_back(**said[True])
    assert fed_back(norm_output=True, **said[True])
    assert not fed_back(norm_output=True, **said[False])
    assert not fed_back(norm_output=False, **said[False])
    for value in (False, True):
        with pytest.raises(Unsupported, match=r"norm_output: .*return_hidden_post_norm"):
            fed_back(norm_output=value)
    with pytest.raises(UserError, match="norm_output: false, but"):
        fed_back(norm_output=False, **said[True])


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("specforge", {"architectures": ["PEagleDraftModel"]}, "architectures: .*in parallel"),
    ("specforge", {"architectures": ["DFlashDraftModel"]}, "architectures: .*by blocks"),
    ("specforge", {"architectures": ["Qwen3NextForCausalLM"]}, "architectures: .*zero-centred"),
    ("specforge", {"architectures": ["DeepseekV3ForCausalLM"]}, "architectures: .*MLA.*experts"),
    (
        "specforge",
        {"architectures": ["LlamaForCausalLM"]},
        "architectures: .*LlamaForCausalLMEagle",
    ),
    ("specforge", {"architectures": None}, "architectures: must be a list of one name"),
    ("speculators", {"speculators_model_type": "dflash"}, "speculators_model_type: 'dflash'"),
    ("speculators", {"speculators_config": {"algorithm": "mtp"}}, r"speculators_config\.algorithm"),
    ("speculators", {"norm_before_residual": ABSENT}, "norm_before_residual: .*vLLM .*true"),
    ("speculators", {"eagle_config": {}}, "eagle_config: an unknown field"),
    ("speculators", {"layer": {"model_type": "gpt_oss"}}, r"layer_config\.model_type: 'gpt_oss'"),
    ("speculators", {"layer": {"num_hidden_layers": 2}}, r"layer_config\.num_hidden_layers: 2"),
    ("speculators", {"layer": {"swiglu": 1}}, r"transformer_layer_config\.swiglu: an unknown"),
    ("speculators", {IDS: [0, 5, 7]}, f"{IDS}: outputs of the layers .-1, 4, 6.; .* 0 to 9"),
    ("speculators", {IDS: [2, 5, 10]}, f"{IDS}: the output of the last layer .* final norm"),
    ("speculators", {IDS: [5, 2, 7]}, f"{IDS}: must be ascending, each layer once"),
    ("speculators", {IDS: [2, 5, 5]}, f"{IDS}: must be ascending, each layer once"),
    ("specforge", {"num_hidden_layers": 2}, "num_hidden_layers: 2; supported: 1"),
    ("specforge", {"num_hidden_layers": ABSENT}, "num_hidden_layers: missing"),
    ("specforge", {"model_type": "qwen3"}, "model_type: 'qwen3'; supported: llama"),
    ("specforge", {"sparkle": 3}, "sparkle: an unknown field, of value 3"),
    ("specforge", {"eagle_config": {"sparkle": 3}}, r"eagle_config\.sparkle: an unknown field"),
    ("specforge", {"eagle_config": {"parallel_draft_step": 2}}, "parallel_draft_step: 2"),
    ("specforge", {"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm: False"),
    ("specforge", {"eagle_config": 3}, "eagle_config: must be an object"),
    ("specforge", {"eagle_config": {IDS: [1, "x"]}}, f"{IDS}: must be a list of integers"),
    ("specforge", {"eagle_config": {IDS: [1, 4, 10]}}, f"eagle_config.{IDS}: outputs of the"),
    ("specforge", {"eagle_config": {IDS: [2, 5, 7]}, IDS: [2, 5, 7]}, f"{IDS}: .*not the same"),
    (
        "specforge",
        {"eagle_config": {"use_aux_hidden_state": False, IDS: [1]}},
        f"{IDS}: .*use_aux_hidden_state is false",
    ),
    (
        "specforge",
        {"eagle_config": {"use_aux_hidden_state": False}, "norm_before_fc": True},
        "norm_before_fc: .*use_aux_hidden_state is false",
    ),
    ("specforge", {"num_aux_hidden_states": 4}, "num_aux_hidden_states: must be 3"),
    ("specforge", {"fc_norm": True, "norm_before_fc": True}, "fc_norm: excludes norm_before_fc"),
    ("specforge", {"norm_before_residual": "yes"}, "norm_before_residual: must be true or false"),
    ("specforge", {"bias": True}, "bias: True; supported: False"),
    ("specforge", {"parallel_drafting": True}, "parallel_drafting: True"),
    ("specforge", {"is_causal": False}, "is_causal: False"),
    ("specforge", {"logit_scale": 0.5}, "logit_scale: 0.5"),
    ("specforge", {"sliding_window": 64}, "sliding_window: sliding-window attention"),
    ("specforge", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    ("specforge", {"quantization_config": {"bits": 4}}, "quantization_config: quantized"),
    ("specforge", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
    ("specforge", {"rope_scaling": {"mrope_section": [1]}}, r"rope_scaling\.mrope_section"),
    (
        "specforge",
        {"rope_parameters": {"rope_theta": 9.0}},
        r"rope_theta: differs from rope_parameters\.rope_theta, 9.0",
    ),
    ("specforge", {"tie_word_embeddings": True}, "tie_word_embeddings: a head that is"),
    ("specforge", {"vocab_size": 96}, "vocab_size: 96, but the target's is 97"),
    ("specforge", {"draft_vocab_size": 98}, "draft_vocab_size: 98 exceeds .* 97"),
    ("specforge", {"layer": {"hidden_size": 24}}, "hidden_size: 24, but the target's is 32"),
    ("specforge", {"target_hidden_size": 48}, "target_hidden_size: 48, but the target's is 32"),
    (
        "specforge",
        {
            "layer": {"hidden_size": 24},
            "target_hidden_size": 32,
            "eagle_config": {"use_aux_hidden_state": False},
        },
        "hidden_size: 24, but the target's is 32.*nothing projects",
    ),
    ("speculators", {"layer": {"vocab_size": 96}}, r"layer_config\.vocab_size: 96.* 97"),
    ("speculators", {"layer": {"hidden_size": 24}}, r"layer_config\.hidden_size: 24.* 32"),
    ("eagle", {"layer": {"hidden_size": 24}}, "hidden_size: 24, but the target's is 32"),
    ("eagle", {"fc_norm": True}, "fc_norm: an unknown field"),
    ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers: 2; supported: 1"),
    ("mimo", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: 2; supported: 1"),
    ("mimo", {"vocab_size": 96}, "vocab_size: 96, but the target's is 97"),
    ("mimo", {"num_hidden_layers": 11}, "num_hidden_layers: 11; supported: 10"),
    ("mimo", {"n_routed_experts": 8}, "n_routed_experts: an unknown field"),
]


@pytest.mark.parametrize(("form", "fields", "message"), REFUSALS)
def test_what_is_unknown_ambiguous_or_another_target_s_is_refused_by_name(
    form: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_chain(tmp_path, form, TARGET)
    read_chain_spec(tmp_path, TARGET)
    layer = fields.get("layer", {})

    def change(config: dict[str, Any]) -> None:
        config |= {name: value for name, value in fields.items() if name != "layer"}
        config.get("transformer_layer_config", config).update(layer)
        for name in [name for name, value in config.items() if value == ABSENT]:
            del config[name]

    edit(tmp_path, change)
    with pytest.raises(UserError, match=message) as caught:
        read_chain_spec(tmp_path, TARGET)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert caught.value.param is not None


def test_broken_weights_are_named(tmp_path: Path) -> None:
    write_chain(tmp_path, "specforge", TARGET)
    weights(tmp_path).write_bytes(b"torn")
    with pytest.raises(UserError, match=r"model\.safetensors: cut short"):
        read_chain_spec(tmp_path, TARGET)


# Computing: the plain version follows the lines "Drafting:" of SPECULATION 14.1 and 14.2.


class Plain:
    """One request's draft rows at once, by full attention in plain torch."""

    def __init__(self, form: str, path: Path, target: Decoder) -> None:
        self.form, self.config = form, json.loads((path / "config.json").read_text())
        self.shape = self.config.get("transformer_layer_config", self.config)
        held = load_file(weights(path))
        self.held = {
            name.removeprefix("model.mtp_layers.0." if form == "mimo" else "model.")
            .removeprefix("midlayer.")
            .removeprefix("layers.0."): tensor
            for name, tensor in held.items()
        }
        self.embed = self.held.get("embed_tokens.weight", target.embedding.weight)
        self.head = self.held.get("lm_head.weight", target.head.weight)

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape["rms_norm_eps"])
        return x * scale * self.held[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.held[f"{name}.weight"], self.held.get(f"{name}.bias"))

    def features(self, taps: Tensor) -> Tensor:
        if "fc_norm.0.weight" in self.held:
            parts = taps.split(TARGET.hidden_size, -1)
            taps = torch.cat([self.norm(f"fc_norm.{i}", p) for i, p in enumerate(parts)], -1)
        if "input_norm.weight" in self.held:
            taps = self.norm("input_norm", taps)
        fused = self.form in ("specforge", "speculators") and "fc.weight" in self.held
        return self.linear("fc", taps) if fused else taps

    def heads(self, name: str, x: Tensor, positions: Tensor) -> Tensor:
        """[heads, n, head_dim], normed and rotated where q and k are."""
        found = self.linear(f"self_attn.{name}_proj", x)
        found = found.unflatten(-1, (-1, self.shape.get("head_dim") or 8)).transpose(0, 1)
        if name == "v":
            return found
        if f"self_attn.{name}_norm.weight" in self.held:
            found = self.norm(f"self_attn.{name}_norm", found)
        scaling = (self.shape.get("rope_scaling") or {}).get("factor", 1.0)
        dim = found.shape[-1]
        theta = self.shape.get("rope_theta", 10000.0)
        angles = positions[:, None] / scaling / theta ** (torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos(), angles.sin()
        a, b = found.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, ids: Tensor, g: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        token = F.embedding(ids, self.embed)
        if self.form == "eagle":
            residual = x = self.linear("fc", torch.cat((token, g), -1))
        elif self.form == "mimo":
            pair = (self.norm("hidden_layernorm", g), self.norm("token_layernorm", token))
            residual = self.linear("input_proj", torch.cat(pair, -1))
            x = self.norm("input_layernorm", residual)
        else:
            hidden = self.norm("hidden_norm", g)
            residual = hidden if self.config.get("norm_before_residual") else g
            x = torch.cat((self.norm("input_layernorm", token), hidden), -1)
        q, k, v = (self.heads(name, x, positions) for name in "qkv")
        group = len(q) // len(k)
        found = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), is_causal=True
        )
        h = residual + self.linear("self_attn.o_proj", found.transpose(0, 1).flatten(1))
        x = self.norm("post_attention_layernorm", h)
        x = F.silu(self.linear("mlp.gate_proj", x)) * self.linear("mlp.up_proj", x)
        output = h + self.linear("mlp.down_proj", x)
        if self.form == "eagle":
            return output, output
        normed = self.norm("final_layernorm" if self.form == "mimo" else "norm", output)
        said = self.config.get("eagle_config") or {}
        feeds_normed = self.form == "mimo" or said.get(
            "return_hidden_post_norm", self.config.get("norm_output")
        )
        return (normed if feeds_normed else output), normed


PAGE_SIZE, NUM_PAGES = 4, 9
PAGES = [5, 2, 7, 1]  # of the one request: slot t is row t % 4 of page PAGES[t // 4]


def run(
    drafter: ChainDrafter,
    attention: ReferenceAttention,
    first: int,
    ids: Tensor,
    g: Tensor,
    *,
    store: bool,
) -> tuple[Tensor, Tensor] | None:
    """Rows for slots `first` and on, behind the slots before them."""
    positions = torch.arange(first, first + len(ids))
    pages = torch.tensor(PAGES)[positions // PAGE_SIZE]
    batch = Batch(
        input_ids=ids,
        positions=positions,
        slot_mapping=pages * PAGE_SIZE + positions % PAGE_SIZE,
        query_start=torch.tensor([0, len(ids)], dtype=torch.int32),
        seq_lens=torch.tensor([first + len(ids)], dtype=torch.int32),
        page_table=torch.tensor([PAGES], dtype=torch.int32),
        num_reqs=1,
        num_tokens=len(ids),
        max_query_len=len(ids),
        max_seq_len_ub=first + len(ids),
    )  # fmt: skip
    with forward_context(batch, attention, attention.plan(batch)):
        if store:
            return drafter.store(ids, g, positions)
        return drafter(ids, g, positions)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_rows_equal_plain_torch(case: str, tmp_path: Path, target: Decoder) -> None:
    """Stored rows for known tokens, then rows that attend, on features and on what is fed back."""
    form, flags = CASES[case]
    write_chain(tmp_path, form, TARGET, **flags)
    drafter, plain = load(tmp_path, target), Plain(form, tmp_path, target)
    spec = drafter.spec
    region = KVRegion("draft", 1, spec.num_kv_heads, spec.head_dim, 1, PAGE_SIZE, "float32")
    pool = KVPool(KVLayout((region,)), NUM_PAGES, CPU)
    for cache in pool.layer(0, "draft"):
        cache.fill_(float("nan"))
    shape = AttentionShape(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5,
        KeyMask(first_key=1), "draft",
    )  # fmt: skip
    attention = ReferenceAttention(pool, shape)

    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(10, spec.num_features * 32, generator=generator)
    ids = torch.randint(97, (13,), generator=generator)
    g = drafter.features(taps)
    assert torch.allclose(g, plain.features(taps), atol=1e-4)
    assert run(drafter, attention, 1, ids[1:7], g[:6], store=True) is None
    before = [cache.clone() for cache in pool.layer(0, "draft")]
    found = run(drafter, attention, 7, ids[7:10], g[6:9], store=False)
    for step in range(10, 13):
        assert found is not None
        fed_back, head_input = found
        rows = torch.arange(1, step)
        wanted = plain.forward(ids[1:step], g[: step - 1], rows)
        for got, expected in zip((fed_back, head_input), wanted, strict=True):
            assert torch.allclose(got, expected[-len(got) :], atol=1e-4)
        logits = drafter.logits(head_input)
        assert logits.shape == (len(head_input), spec.vocab_size)
        assert torch.allclose(logits, head_input @ plain.head.T, atol=1e-4)
        g = torch.cat((g[: step - 1], fed_back[-1:]))
        found = run(drafter, attention, step, ids[step : step + 1], g[-1:], store=False)

    run(drafter, attention, 1, ids[1:7], g[:6], store=False)
    slots = {(PAGES[t // PAGE_SIZE], t % PAGE_SIZE) for t in range(1, 13)}
    for cache, stored in zip(pool.layer(0, "draft"), before, strict=True):
        written = cache.isfinite().all(-1).all(1)
        assert {(page, row) for page, row in written.nonzero().tolist()} == slots
        both = stored.isfinite()  # the keys and values that store() made and forward() made again
        assert both.sum() == 6 * spec.num_kv_heads * spec.head_dim
        assert torch.allclose(cache[both], stored[both], atol=1e-5)
    pool.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_pass_reads_no_value_from_the_device(form: str, tmp_path: Path) -> None:
    """On the meta device any .item(), .tolist() or copy to the host raises."""
    write_chain(tmp_path, form, TARGET)
    meta, kind = torch.device("meta"), torch.bfloat16
    target = Decoder(TARGET, Placement(SingleCollective(), kind, meta))
    spec = read_chain_spec(tmp_path, TARGET)
    drafter = ChainDrafter(
        spec, target, SingleCollective(), max_positions=64, device=meta, dtype=kind
    )
    region = KVRegion("draft", 1, 2, 8, 1, PAGE_SIZE, "bfloat16")
    pool = KVPool(KVLayout((region,)), NUM_PAGES, meta)
    attention = ReferenceAttention(
        pool, AttentionShape(4, 2, 8, 0.35, KeyMask(first_key=1), "draft")
    )
    long, short = {"dtype": torch.int64, "device": meta}, {"dtype": torch.int32, "device": meta}
    batch = Batch(
        input_ids=torch.empty(6, **long),
        positions=torch.empty(6, **long),
        slot_mapping=torch.empty(6, **long),
        query_start=torch.empty(4, **short),
        seq_lens=torch.empty(3, **short),
        page_table=torch.empty(3, 5, **short),
        num_reqs=3,
        num_tokens=6,
        max_query_len=4,
        max_seq_len_ub=17,
    )
    taps = torch.empty(6, spec.num_features * 32, dtype=kind, device=meta)
    with forward_context(batch, attention, attention.plan(batch)):
        g = drafter.features(taps)
        drafter.store(batch.input_ids, g, batch.positions)
        fed_back, head_input = drafter(batch.input_ids, g, batch.positions)
    logits = drafter.logits(head_input)
    assert (fed_back.shape, fed_back.dtype) == ((6, 32), kind)
    assert (logits.shape, logits.dtype) == ((6, 97), kind)
