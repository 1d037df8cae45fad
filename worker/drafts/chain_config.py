"""Read a chain drafter's directory into one checked record. Free of torch.

Published drafters differ in flags and in names, and a wrong reading lowers acceptance without any
error. So every field that is not known here is refused, and so is one with two readings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from worker.drafts.chain_fields import FIXED, IRRELEVANT, MTP, REFUSED, SHAPE
from worker.drafts.chain_spec import ChainSpec, Names, check_pairing, layer_names, read_geometry
from worker.drafts.eagle3_config import read_specforge, read_speculators
from worker.model.fields import Fields, read_fields
from worker.model.shape import ModelSpec, read_architecture


def read_chain_spec(path: Path, target: ModelSpec) -> ChainSpec:
    """The drafter in directory `path`, which may be the target's own, for `target`.

    Raises:
        UserError: a file is missing or broken, a field is missing or wrong, or the drafter is
            another target's; the message names file and field. Unsupported (a UserError) if it
            uses what we cannot compute, or a field has two readings or is unknown.
    """
    fields = read_fields(path / "config.json")
    if (kind := fields.get("speculators_model_type")) is not None:
        if kind == "dflash":
            raise fields.unsupported(
                "speculators_model_type", "'dflash' drafts by blocks: set spec.drafter to dflash"
            )
        fields.choice("speculators_model_type", "eagle3")
        return read_speculators(path, fields, target)
    name = read_architecture(fields)
    if name in REFUSED:
        raise fields.unsupported("architectures", f"a drafter of {name} needs {REFUSED[name]}")
    if name not in FORMS:
        raise fields.unsupported(
            "architectures",
            f"{name!r} is no chain drafter that we know; supported: {', '.join(FORMS)}, "
            "and speculators' eagle3",
        )
    return FORMS[name](path, fields, target)


def _read_eagle(path: Path, fields: Fields, target: ModelSpec) -> ChainSpec:
    """EAGLE-1 and EAGLE-2: one projection of token and feature, no first norm and no last."""
    fields.only(IRRELEVANT | SHAPE)
    fields.choice("model_type", "llama")
    check_pairing(fields, target, fields)
    files = Names(path)
    names = layer_names(files.place("layers.0")) | {"projection": files.place("fc")}
    names |= files.optional("embedding", "embed_tokens", needed=False)
    fixed = {name: value for name, value in FIXED.items() if name != "bias"}
    return ChainSpec(
        architecture="LlamaForCausalLMEagle",
        form="eagle",
        **read_geometry(fields, fixed=fixed),
        qkv_bias=fields.flag("attention_bias"),
        output_bias=fields.flag("attention_bias"),
        qk_norm=fields.flag("qk_norm"),
        projection_bias=fields.flag("bias", default=True),
        vocab_size=target.vocab_size,
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        taps=(target.num_layers,),
        norm_before_residual=False,
        norm_output=False,
        hidden_first=False,
        names=names,
    )


def _read_mimo(path: Path, fields: Fields, target: ModelSpec) -> ChainSpec:
    """MiMo's layer for the token after next, in the target's own files."""
    fields.only(IRRELEVANT | SHAPE | MTP)
    check_pairing(fields, target, fields)
    fields.integer("num_nextn_predict_layers")
    fields.fixed({"num_nextn_predict_layers": 1})
    prefix = "model.mtp_layers.0"
    names = layer_names(prefix) | {
        "token_norm": f"{prefix}.token_layernorm",
        "hidden_norm": f"{prefix}.hidden_layernorm",
        "layer_norm": f"{prefix}.input_layernorm",
        "projection": f"{prefix}.input_proj",
        "final_norm": f"{prefix}.final_layernorm",
    }
    return ChainSpec(
        architecture="MiMoForCausalLM",
        form="mtp",
        **read_geometry(fields, num_layers=target.num_layers),
        qkv_bias=True,  # always, as Qwen2 has it
        output_bias=False,
        qk_norm=False,
        projection_bias=False,
        vocab_size=target.vocab_size,
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        taps=(target.num_layers,),
        norm_before_residual=False,
        norm_output=True,
        hidden_first=True,
        names=names,
    )


# `architectures[0]` -> who reads it.
FORMS: Mapping[str, Callable[[Path, Fields, ModelSpec], ChainSpec]] = {
    "LlamaForCausalLMEagle3": read_specforge,
    "LlamaForCausalLMEagle": _read_eagle,
    "MiMoForCausalLM": _read_mimo,
}
