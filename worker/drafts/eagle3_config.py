"""EAGLE-3 drafters' directories, in the two ways in which they are published. Free of torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from worker.drafts.chain_fields import (
    EAGLE3,
    EAGLE_CONFIG,
    FIXED_EAGLE_CONFIG,
    IRRELEVANT,
    SHAPE,
    SPECULATORS,
)
from worker.drafts.chain_spec import (
    ChainSpec,
    Names,
    check_pairing,
    check_taps,
    check_tied,
    layer_names,
    read_geometry,
    read_vocab_size,
)
from worker.model.fields import Fields
from worker.model.shape import ModelSpec


def read_specforge(path: Path, fields: Fields, target: ModelSpec) -> ChainSpec:
    """EAGLE-3 as its authors, SpecForge and ModelOpt write it."""
    fields.only(IRRELEVANT | SHAPE | EAGLE3)
    fields.choice("model_type", "llama")
    eagle = fields.inner("eagle_config")
    spec = _read_eagle3(
        path, fields, fields, target, "midlayer", norm_output=_norm_output(fields, eagle),
        norm_before_residual=fields.flag("norm_before_residual"),
    )  # fmt: skip
    if spec.vocab_size == spec.target_vocab_size:  # else the head cannot be an embedding
        check_tied(fields, target, spec.names)
    return spec


def _norm_output(fields: Fields, eagle: Fields) -> bool:
    """Is the normed output fed back?

    Early SpecForge meant by `norm_output` whether the head takes the normed output, and never fed
    that back; everybody else means what is fed back. TensorRT-LLM's field has one meaning.
    """
    said = eagle.get("return_hidden_post_norm")
    if fields.get("norm_output") is None:
        return eagle.flag("return_hidden_post_norm")
    if said is None:
        raise fields.unsupported(
            "norm_output",
            "means what the head takes in early SpecForge, what is fed back elsewhere; say which "
            "by eagle_config.return_hidden_post_norm: is the output after the norm fed back?",
        )
    fed_back = eagle.flag("return_hidden_post_norm")
    if fed_back and not fields.flag("norm_output"):
        raise fields.error("norm_output", "false, but eagle_config.return_hidden_post_norm true")
    return fed_back


def read_speculators(path: Path, fields: Fields, target: ModelSpec) -> ChainSpec:
    """EAGLE-3 as speculators writes it, for vLLM."""
    fields.only(IRRELEVANT | SPECULATORS | EAGLE3 - {"eagle_config"})
    fields.inner("speculators_config").choice("algorithm", "eagle3")
    layer = fields.inner("transformer_layer_config")
    layer.only(IRRELEVANT | SHAPE)
    layer.choice("model_type", "llama", "qwen3")
    if fields.get("norm_before_residual") is None:
        raise fields.unsupported(
            "norm_before_residual",
            "missing: vLLM takes it as true then, speculators as false; set it",
        )
    return _read_eagle3(
        path, fields, layer, target, "layers.0", norm_output=fields.flag("norm_output"),
        norm_before_residual=fields.flag("norm_before_residual"),
    )  # fmt: skip


def _read_eagle3(
    path: Path,
    fields: Fields,
    layer: Fields,
    target: ModelSpec,
    layer_name: str,
    *,
    norm_output: bool,
    norm_before_residual: bool,
) -> ChainSpec:
    """Both ways of writing: `layer` holds the transformer's fields, `fields` all others."""
    eagle = fields.inner("eagle_config")
    eagle.only(EAGLE_CONFIG)
    eagle.fixed(FIXED_EAGLE_CONFIG)
    fuses = eagle.flag("use_aux_hidden_state", default=True)
    geometry, size = read_geometry(layer), "target_hidden_size"
    if fields.get(size) is not None:
        check_pairing(layer, target, fields, size)
    else:
        check_pairing(layer, target, layer)
    if geometry["hidden_size"] != target.hidden_size and not fuses:
        raise layer.error(
            "hidden_size", f"{geometry['hidden_size']}, but the target's is {target.hidden_size}, "
            "and without use_aux_hidden_state nothing projects one to the other",
        )  # fmt: skip
    spec = ChainSpec(
        architecture="LlamaForCausalLMEagle3" if layer is fields else "speculators' eagle3",
        form="eagle3",
        **geometry,
        qkv_bias=layer.flag("attention_bias"),
        output_bias=layer.flag("attention_bias"),
        qk_norm=layer.flag("qk_norm") or layer.get("model_type") == "qwen3",
        projection_bias=False,
        vocab_size=read_vocab_size(fields, target),
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        taps=_taps(fields, eagle, target.num_layers, fuses=fuses),
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
        hidden_first=False,
        names={},
    )
    norm = _norm_of_features(fields, eagle, fuses=fuses)
    return replace(spec, names=_names(Names(path), spec, layer_name, norm, fuses=fuses))


def _norm_of_features(fields: Fields, eagle: Fields, *, fuses: bool) -> str | None:
    """Which norm stands before fc; None: none."""
    each, together = fields.flag("fc_norm"), fields.flag("norm_before_fc")
    together = together or eagle.flag("norm_before_fc")
    if each and together:
        raise fields.error("fc_norm", "excludes norm_before_fc, but both are true")
    if not each and not together:
        return None
    if not fuses:
        name = "fc_norm" if each else "norm_before_fc"
        raise fields.error(name, "norms what fc fuses, but use_aux_hidden_state is false")
    return "fc_norm" if each else "input_norm"


def _names(
    files: Names, spec: ChainSpec, layer: str, norm: str | None, *, fuses: bool
) -> dict[str, str]:
    """See ChainSpec.names; each part may be called as either way of writing calls it."""
    layer = files.place(layer, *{"midlayer", "layers.0"} - {layer})
    found = layer_names(layer) | {
        "token_norm": f"{layer}.input_layernorm",
        "hidden_norm": f"{layer}.hidden_norm",
        "final_norm": files.place("norm"),
    }
    if fuses:
        found["fc"] = files.place("fc")
    if norm is not None:
        found[norm] = files.place(norm)
    other_size = spec.hidden_size != spec.target_hidden_size
    reduced = spec.vocab_size != spec.target_vocab_size
    found |= files.optional("embedding", "embed_tokens", needed=other_size)
    found |= files.optional("head", "lm_head", needed=other_size or reduced)
    found |= files.optional("d2t", "d2t", needed=reduced)
    return found | files.optional("t2d", "t2d", needed=False)


def _taps(fields: Fields, eagle: Fields, num_layers: int, *, fuses: bool) -> tuple[int, ...]:
    """Which of the target's layers are tapped, in the one convention of ChainSpec.

    In `eagle_config` an id means the output of that layer, at the top level its input.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    outputs, inputs = tuple(eagle.integers(name)), tuple(fields.integers(name))
    shifted = tuple(each - 1 for each in inputs)
    if outputs and inputs and outputs != shifted:
        raise fields.error(
            name, f"{list(inputs)} are the inputs of layers, eagle_config.{name} {list(outputs)} "
            "the outputs, and these are not the same",
        )  # fmt: skip
    where, taps = (eagle, outputs) if outputs else (fields, shifted)
    if not fuses:
        if taps:
            raise where.error(name, "eagle_config.use_aux_hidden_state is false")
        return (num_layers,)
    if num_layers in inputs:
        raise fields.unsupported(
            name, f"the output of the last layer ({num_layers}), before or after the final norm"
        )
    taps = taps or (1, num_layers // 2 - 1, num_layers - 4)
    check_taps(where, name, taps, num_layers)
    if fields.integer("num_aux_hidden_states", default=len(taps)) != len(taps):
        raise fields.error("num_aux_hidden_states", f"must be {len(taps)}, as there are layer ids")
    return taps
