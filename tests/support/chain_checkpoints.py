"""Directories of small chain drafters with random weights, as each project would publish them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from worker.config.checkpoint.shape import ModelShape
from worker.errors import UserError

FORMS = ("specforge", "speculators", "eagle", "mimo")
ABSENT = "absent"  # as the value of a field: leave it out
# A target for them.
TARGET = ModelShape(
    architecture="Qwen2ForCausalLM", hidden_size=32, num_layers=10, num_heads=4, num_kv_heads=2,
    head_dim=8, intermediate_size=48, vocab_size=97, rms_norm_eps=1e-6, rope_theta=10000.0,
    rope_scaling=None, rotary_dim=8, tie_word_embeddings=False, flags=(),
    max_position_embeddings=64, dtype="float32", eos_token_ids=(0,), penalizes=False,
)  # fmt: skip


def write_chain(
    directory: Path,
    form: str,
    target: ModelShape,
    *,
    seed: int = 0,
    prefix: str = "",
    own: Sequence[str] = (),
    layer: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Tensor]:
    """Write a drafter for `target` in one of FORMS; returns its tensors, f32.

    "mimo" writes into the target's own directory, if that is there: beside its weights.

    Args:
        seed: of the weights.
        prefix: before all names but those of the head and of the tables of ids, as "model.".
        own: of "embed_tokens", "lm_head" and "t2d", what the file has although it could do without.
        layer: fields of the transformer layer, which speculators nests.
        fields: other fields of config.json, with ABSENT to leave one out that is there otherwise.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config, shape = _config(directory, form, target, layer or {}, fields)
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {
        name if name in ("lm_head.weight", "d2t", "t2d") else prefix + name: size
        for name, size in _shapes(form, target, config, shape, own).items()
    }
    tensors = random_tensors(shapes, target.vocab_size, seed)
    save_file(tensors, directory / ("mtp.safetensors" if form == "mimo" else "model.safetensors"))
    return tensors


def change_config(directory: Path, fields: Mapping[str, Any]) -> None:
    """Set fields of config.json; `layer` holds those of the transformer layer, `dflash` those of
    dflash_config."""
    config, fields = json.loads((directory / "config.json").read_text()), dict(fields)
    layer = config.get("transformer_layer_config", config)
    layer |= fields.pop("layer", {})
    if "dflash" in fields:
        config["dflash_config"] |= fields.pop("dflash")
    config |= fields
    if layer is not config:
        config["transformer_layer_config"] = left(layer)
    (directory / "config.json").write_text(json.dumps(left(config)))


def check_refused(
    directory: Path, read: Callable[[Path], object], fields: Mapping[str, Any], message: str
) -> None:
    """Assert that a drafter is read, and no more with these fields; see `change_config`."""
    read(directory)
    change_config(directory, fields)
    with pytest.raises(UserError, match=message) as caught:
        read(directory)
    assert str(directory / "config.json") in str(caught.value)
    assert caught.value.param is not None
    assert re.search(r"\b(take|set)\b", str(caught.value)), "what could be done instead"


def random_tensors(
    shapes: dict[str, tuple[int, ...]], vocab_size: int, seed: int
) -> dict[str, Tensor]:
    """Noise of these shapes, f32, and tables of a drafter's ids where `shapes` has them.

    vocab_size: of the target, whose ids d2t and t2d name.
    """
    generator = torch.Generator().manual_seed(seed)
    plain = [name for name in shapes if name not in ("d2t", "t2d")]
    tensors = {name: _noise(name, shapes[name], generator) for name in plain}
    if "d2t" in shapes:
        (num_ids,) = shapes["d2t"]
        ids = torch.randperm(vocab_size, generator=generator)[:num_ids].sort().values
        tensors["d2t"] = ids - torch.arange(num_ids)
        if "t2d" in shapes:
            tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool)
            tensors["t2d"][ids] = True
    return tensors


def layer_fields(target: ModelShape, **fields: Any) -> dict[str, Any]:
    """What a drafter of any form says of its layers, but for `fields`."""
    return {
        "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "max_position_embeddings": 32,
        "attention_bias": False, "initializer_range": 0.02, **fields,
    }  # fmt: skip


def _config(
    directory: Path, form: str, target: ModelShape, layer: dict[str, Any], fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, the object in it that holds the layer's fields)."""
    shape = layer_fields(
        target, intermediate_size=3 * target.hidden_size, num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads, head_dim=target.head_dim, num_hidden_layers=1,
        model_type="llama",
    )  # fmt: skip
    config: dict[str, Any] = {"torch_dtype": "float32", "transformers_version": "4.57.1"}
    if form == "specforge":
        config |= shape | layer | {"architectures": ["LlamaForCausalLMEagle3"]}
    elif form == "speculators":
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "any"}},
            "norm_before_residual": False,
            "transformer_layer_config": left(shape | layer),
        }
    elif form == "eagle":
        config |= shape | layer | {"architectures": ["LlamaForCausalLMEagle"], "bias": True}
    else:
        assert form == "mimo", form
        file = directory / "config.json"
        held = json.loads(file.read_text()) if file.exists() else shape | {"eos_token_id": 0}
        own = {"attention_bias": True, "num_hidden_layers": target.num_layers}
        config = {"head_dim": target.head_dim} | held | own | layer
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        config["num_nextn_predict_layers"] = 1
    config = left(config | fields)
    return config, config.get("transformer_layer_config", config)


def left(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value != ABSENT}


def _shapes(
    form: str, target: ModelShape, config: dict[str, Any], shape: dict[str, Any], own: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, as published files have them."""
    size, eagle = shape["hidden_size"], config.get("eagle_config") or {}
    vocab_size = config.get("draft_vocab_size") or target.vocab_size
    if form == "mimo":
        at = "model.mtp_layers.0"
        return layer_shapes(at, shape, size, qkv_bias=True) | {
            f"{at}.token_layernorm.weight": (size,),
            f"{at}.hidden_layernorm.weight": (size,),
            f"{at}.input_proj.weight": (size, 2 * size),
            f"{at}.input_layernorm.weight": (size,),
            f"{at}.final_layernorm.weight": (size,),
        }
    bias = bool(shape.get("attention_bias"))
    if form == "eagle":
        found = layer_shapes("layers.0", shape, size, qkv_bias=bias, output_bias=bias)
        found["fc.weight"] = (size, 2 * size)
        if config.get("bias", True):
            found["fc.bias"] = (size,)
    else:
        at = "midlayer" if form == "specforge" else "layers.0"
        found = layer_shapes(at, shape, 2 * size, qkv_bias=bias, output_bias=bias)
        found |= {
            f"{at}.input_layernorm.weight": (size,),
            f"{at}.hidden_norm.weight": (size,),
            "norm.weight": (size,),
        }
        ids = eagle.get("eagle_aux_hidden_state_layer_ids")
        ids = ids or config.get("eagle_aux_hidden_state_layer_ids") or [1, 2, 3]
        if eagle.get("use_aux_hidden_state", True):
            found["fc.weight"] = (size, len(ids) * target.hidden_size)
        if config.get("fc_norm"):
            found |= {f"fc_norm.{i}.weight": (target.hidden_size,) for i in range(len(ids))}
        if config.get("norm_before_fc"):
            found["input_norm.weight"] = (len(ids) * target.hidden_size,)
        if vocab_size < target.vocab_size:
            found |= {"lm_head.weight": (vocab_size, size), "d2t": (vocab_size,)}
    of_own = {
        "embed_tokens": ("embed_tokens.weight", (target.vocab_size, size)),
        "lm_head": ("lm_head.weight", (vocab_size, size)),
        "t2d": ("t2d", (target.vocab_size,)),
    }
    return found | dict(of_own[name] for name in own)


def layer_shapes(
    at: str, shape: dict[str, Any], in_size: int, *, qkv_bias: bool, output_bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what every form's layer has, behind `at`; in_size: of q, k and v."""
    size, head_dim, inner = shape["hidden_size"], shape["head_dim"], shape["intermediate_size"]
    q, kv = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    found: dict[str, tuple[int, ...]] = {
        f"{at}.self_attn.{name}.weight": (num, in_size) for name, num in rows.items()
    }
    if qkv_bias:
        found |= {f"{at}.self_attn.{name}.bias": (num,) for name, num in rows.items()}
    if output_bias:
        found[f"{at}.self_attn.o_proj.bias"] = (size,)
    if shape.get("qk_norm") or shape.get("model_type") == "qwen3":
        found |= {f"{at}.self_attn.{each}_norm.weight": (head_dim,) for each in "qk"}
    return found | {
        f"{at}.self_attn.o_proj.weight": (size, q),
        f"{at}.post_attention_layernorm.weight": (size,),
        f"{at}.mlp.gate_proj.weight": (inner, size),
        f"{at}.mlp.up_proj.weight": (inner, size),
        f"{at}.mlp.down_proj.weight": (size, inner),
    }


def _noise(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Keeps activations near unit scale, with every norm and bias far from doing nothing."""
    noise = torch.randn(size, generator=generator)
    if len(size) > 1:
        return noise * size[-1] ** -0.5
    return 1 + 0.3 * noise if "norm" in name else 0.3 * noise
