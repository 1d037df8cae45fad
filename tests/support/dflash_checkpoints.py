"""Directories of small DFlash drafters with random weights, as each project would publish them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tests.support import chain_checkpoints as chain
from tests.support.chain_checkpoints import ABSENT, left
from worker.config.checkpoint.shape import ModelShape

FORMS = ("zlab", "speculators")
TAPS = (1, 4, 6)  # after these layers of the target

TARGET = replace(chain.TARGET, architecture="Qwen3ForCausalLM")


def write_dflash(
    directory: Path,
    target: ModelShape = TARGET,
    form: str = "zlab",
    *,
    taps: Sequence[int] = TAPS,
    own: Sequence[str] = (),
    prefix: str = "",
    aliases: bool = False,
    seed: int = 0,
    **options: Any,
) -> dict[str, Tensor]:
    """Write a drafter for `target` in one of FORMS; returns its tensors, f32.

    Args:
        taps, options: see `config_of`.
        own: of "embed_tokens", "lm_head", "mask_embedding" and "t2d", what the files have although
            they could do without.
        prefix: before all names but those of the head and of the tables of ids, as "model.".
        aliases: the names of some files: encoder.fc and encoder.output_norm_enc.
    """
    config = config_of(target, form, taps=taps, **options)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    shape = config.get("transformer_layer_config", config)
    size, bias = shape["hidden_size"], shape["attention_bias"]
    fc, norm = ("encoder.fc", "encoder.output_norm_enc") if aliases else ("fc", "hidden_norm")
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}{fc}.weight": (size, len(taps) * target.hidden_size),
        f"{prefix}{norm}.weight": (size,),
        f"{prefix}norm.weight": (size,),
    }
    for i in range(shape["num_hidden_layers"]):
        at, normed = f"{prefix}layers.{i}", shape | {"qk_norm": True}
        shapes |= chain.layer_shapes(at, normed, size, qkv_bias=bias, output_bias=bias)
        shapes[f"{at}.input_layernorm.weight"] = (size,)
    vocab_size = config.get("draft_vocab_size") or target.vocab_size
    of_own = {
        "embed_tokens": (f"{prefix}embed_tokens.weight", (target.vocab_size, size)),
        "lm_head": ("lm_head.weight", (vocab_size, size)),
        "mask_embedding": (f"{prefix}mask_embedding", (size,)),
        "d2t": ("d2t", (vocab_size,)),
        "t2d": ("t2d", (target.vocab_size,)),
    }
    reduced = ("lm_head", "d2t") if "draft_vocab_size" in config else ()
    shapes |= dict(of_own[name] for name in (*reduced, *own))
    tensors = chain.random_tensors(shapes, target.vocab_size, seed)
    save_file(tensors, directory / "model.safetensors")
    return tensors


def config_of(
    target: ModelShape = TARGET,
    form: str = "zlab",
    *,
    taps: Sequence[int] = TAPS,
    num_layers: int = 2,
    block_size: int = 4,
    mask_token_id: int | str = 96,
    draft_vocab_size: int | None = None,
    sliding: Sequence[int] = (),
    window: int = 3,
    causal: bool | None = None,
    bias: bool = False,
    layer: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """config.json of a drafter for `target` in one of FORMS.

    Args:
        taps: after which of the target's layers, whatever the form calls these.
        draft_vocab_size: ids of the head, which is the drafter's own then; None: the target's.
        sliding: the layers that see `window` tokens, itself among them.
        causal: of all layers in "zlab", of the sliding ones in "speculators"; None: not said, or in
            "speculators" true.
        bias: of the attention.
        layer: other fields of the transformer's layers, which speculators nests.
        fields: other fields of config.json. ABSENT as a value leaves a field out.
    """
    shape = chain.layer_fields(
        target, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=num_layers, attention_bias=bias, model_type="qwen3",
    )  # fmt: skip
    if sliding:
        kinds = ("full_attention", "sliding_attention")
        shape["layer_types"] = [kinds[i in sliding] for i in range(num_layers)]
        shape |= {"sliding_window": window, "use_sliding_window": True}
    shape = left(shape | (layer or {}))
    dflash = {"mask_token_id": mask_token_id, "target_layer_ids": list(taps)}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size,
        "draft_vocab_size": ABSENT if draft_vocab_size is None else draft_vocab_size,
        "transformers_version": "4.57.1",
    }
    if form == "zlab":
        dflash["causal"] = ABSENT if causal is None else causal
        config |= shape | {
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "dflash_config": left(dflash),
            "dtype": "float32",
            "num_target_layers": target.num_layers,
            "tie_word_embeddings": False,
        }
    else:
        assert form == "speculators", form
        config |= {
            "aux_hidden_state_layer_ids": [each + 1 for each in taps],
            "dtype": "float32",
            "mask_token_id": mask_token_id,
            "max_anchors": 3072,
            "sliding_window_non_causal": causal is False,
            "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "any"}},
            "speculators_model_type": "dflash",
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": shape,
        }
    return left(config | fields)
