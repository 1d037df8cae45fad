"""Read a DFlash drafter's directory into one checked record. Free of torch.

Published drafters differ in flags and in names, and a wrong reading lowers acceptance without any
error. So every field that is not known here is refused, and so is one with two readings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker.drafts.chain_config import FORMS as CHAIN_FORMS
from worker.drafts.chain_fields import IRRELEVANT, SHAPE
from worker.drafts.chain_spec import (
    Names,
    check_pairing,
    check_taps,
    check_tied,
    read_geometry,
    read_vocab_size,
)
from worker.drafts.dflash_fields import (
    DFLASH_CONFIG,
    FIXED_DFLASH,
    FIXED_LAYER,
    LAYER,
    PARTS_OF_RELATIVES,
    RELATIVES,
    SPECULATORS_DFLASH,
    ZLAB,
)
from worker.drafts.dflash_spec import DFlashSpec
from worker.errors import Unsupported
from worker.model.fields import Fields, read_fields
from worker.model.shape import ModelSpec, read_architecture, read_dtype
from worker.ops.mask import KeyMask

SLIDING, FULL = "sliding_attention", "full_attention"


def read_dflash_spec(path: Path, target: ModelSpec) -> DFlashSpec:
    """The DFlash drafter in directory `path`, for `target`.

    Raises:
        UserError: a file is missing or broken, a field is missing or wrong, or the drafter is
            another target's; the message names file and field. Unsupported (a UserError) if it
            uses what we cannot compute, or a field has two readings or is unknown.
    """
    fields = read_fields(path / "config.json")
    if (kind := fields.get("speculators_model_type")) is not None:
        _refuse_others(fields, "speculators_model_type", kind, chains=["eagle3"])
        fields.choice("speculators_model_type", "dflash")
        return _read_speculators(path, fields, target)
    name = read_architecture(fields)
    _refuse_others(fields, "architectures", name, chains=list(CHAIN_FORMS))
    if name != "DFlashDraftModel":
        raise fields.unsupported(
            "architectures",
            f"{name!r} is no DFlash drafter that we know; supported: DFlashDraftModel, and "
            "speculators' dflash",
        )
    return _read_zlab(path, fields, target)


def _refuse_others(fields: Fields, field: str, name: Any, *, chains: list[str]) -> None:
    """Refuse drafters of other kinds by what they are."""
    if name in chains:
        raise fields.unsupported(
            field, f"{name!r} drafts token by token: set spec.drafter to chain"
        )
    if isinstance(name, str) and name in RELATIVES:
        raise fields.unsupported(field, f"a drafter of {name} needs {RELATIVES[name]}")


def _read_zlab(path: Path, fields: Fields, target: ModelSpec) -> DFlashSpec:
    """DFlash as its authors, SpecForge and ModelOpt write it."""
    dflash = fields.inner("dflash_config")
    _check_fields(fields, IRRELEVANT | SHAPE | ZLAB)
    _check_fields(dflash, DFLASH_CONFIG)
    fields.choice("model_type", "qwen3")
    _check_depth(fields, dflash, target)
    causal = None if fields.get("is_causal") is None else fields.flag("is_causal")
    if dflash.get("causal") is not None:
        if causal not in (None, dflash.flag("causal")):
            raise fields.error("is_causal", f"{causal}, but dflash_config.causal {not causal}")
        causal = dflash.flag("causal")
    types, windows = _layers(fields, dflash)
    taps = tuple(dflash.integers("target_layer_ids"))
    if not taps:
        taps = _default_taps(len(types), target.num_layers)
    _check_taps(dflash, "target_layer_ids", taps, target.num_layers)
    spec = _build(
        path, fields, fields, target, taps=taps, windows=windows,
        causal=[kind == SLIDING if causal is None else causal for kind in types],
    )  # fmt: skip
    if spec.vocab_size == target.vocab_size:  # else the head cannot be an embedding
        check_tied(fields, target, spec.names)
    return spec


def _check_depth(fields: Fields, dflash: Fields, target: ModelSpec) -> None:
    """Refuse a drafter of a target of another number of layers."""
    name = "num_target_layers"
    where = _one_of(fields, dflash, name)
    if (number := where.integer(name, default=target.num_layers)) != target.num_layers:
        raise where.error(
            name,
            f"{number}, but the target's is {target.num_layers}: the drafter is another target's",
        )


def _read_speculators(path: Path, fields: Fields, target: ModelSpec) -> DFlashSpec:
    """DFlash as speculators writes it, for vLLM."""
    _check_fields(fields, IRRELEVANT | SPECULATORS_DFLASH)
    fields.inner("speculators_config").choice("algorithm", "dflash")
    layer = fields.inner("transformer_layer_config")
    _check_fields(layer, IRRELEVANT | LAYER)
    layer.choice("model_type", "llama", "qwen3")  # the layers are Qwen3's either way
    num_layers = layer.integer("num_hidden_layers")
    if (number := fields.integer("num_hidden_layers", default=num_layers)) != num_layers:
        raise fields.error(
            "num_hidden_layers", f"{number}, but transformer_layer_config says {num_layers}"
        )
    types, windows = _layers(layer, layer.inner("dflash_config"))
    name = "sliding_window_non_causal"
    if SLIDING in types and fields.get(name) is None:
        raise fields.unsupported(
            name, "missing: speculators takes it as false then, others as true; set it"
        )
    slides_causally = not fields.flag(name)
    name = "aux_hidden_state_layer_ids"
    inputs = fields.integers(name)
    if not inputs:
        raise fields.error(name, "missing: of which layers does the drafter take the inputs?")
    taps = tuple(each - 1 for each in inputs)
    _check_taps(fields, name, taps, target.num_layers)
    return _build(
        path, fields, layer, target, taps=taps, windows=windows,
        causal=[kind == SLIDING and slides_causally for kind in types],
    )  # fmt: skip


def _check_fields(fields: Fields, known: frozenset[str]) -> None:
    """Refuse what relatives of DFlash have by what it is, then all else that is not known."""
    for field, value in fields.values.items():
        for start, part in PARTS_OF_RELATIVES.items():
            if field.startswith(start) and value is not None:
                raise fields.unsupported(field, f"{value!r} asks for {part}")
    fields.fixed(FIXED_DFLASH)
    fields.only(known | set(FIXED_DFLASH))


def _build(
    path: Path,
    fields: Fields,
    layer: Fields,
    target: ModelSpec,
    *,
    taps: tuple[int, ...],
    windows: list[int | None],
    causal: list[bool],
) -> DFlashSpec:
    """Both ways of writing: `layer` holds the transformer's fields, `fields` all others.

    Args:
        taps: after which of the target's layers.
        windows: tokens, by layer; None: all.
        causal: by layer.
    """
    check_pairing(layer, target, layer)
    if fields.get("target_hidden_size") is not None:
        check_pairing(layer, target, fields, "target_hidden_size")
    _check_said(layer)
    geometry = read_geometry(layer, num_layers=None, windows=True, fixed=FIXED_LAYER)
    if fields.get("dtype") is not None or fields.get("torch_dtype") is not None:
        geometry["dtype"] = read_dtype(fields)
    dflash = fields.inner("dflash_config")
    where = _one_of(fields, dflash, "block_size")
    block_size = where.integer("block_size", least=2)  # the first is no draft
    vocab_size = read_vocab_size(fields, target)
    names = _names(Names(path), reduced=vocab_size != target.vocab_size)
    return DFlashSpec(
        architecture="DFlashDraftModel" if layer is fields else "speculators' dflash",
        num_layers=len(windows),
        **geometry,
        qkv_bias=layer.flag("attention_bias"),
        output_bias=layer.flag("attention_bias"),
        qk_norm=True,
        block_size=block_size,
        masks=tuple(
            KeyMask(causal=each, window=window)
            for each, window in zip(causal, windows, strict=True)
        ),
        mask_token_id=_mask_token_id(path, fields, dflash, names, target),
        vocab_size=vocab_size,
        target_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        taps=taps,
        names=names,
    )


def _check_said(layer: Fields) -> None:
    """Refuse a file that leaves out what its readers take differently then."""
    rope = (layer, layer.inner("rope_parameters"), layer.inner("rope_scaling"))
    if all(each.get("rope_theta") is None for each in rope):
        raise layer.unsupported(
            "rope_theta", "missing: vLLM takes it as 1000000 then, others as 10000; set it"
        )
    if layer.get("head_dim") is None:
        raise layer.unsupported(
            "head_dim",
            "missing: taken as 128 by some then, as hidden_size / num_attention_heads by others; "
            "set it",
        )


def _one_of(fields: Fields, dflash: Fields, field: str) -> Fields:
    """Whichever of the two has the field, which older files have at the top level."""
    inner, outer = dflash.get(field), fields.get(field)
    if inner is not None and outer is not None and inner != outer:
        raise fields.error(field, f"{outer!r}, but dflash_config.{field} {inner!r}")
    return fields if inner is None else dflash


def _layers(layer: Fields, dflash: Fields) -> tuple[list[str], list[int | None]]:
    """(types as the file has them, windows in tokens or None) of all layers.

    `dflash_config.use_swa` gives every layer a window and leaves its type, so its causality, alone.
    """
    num_layers = layer.integer("num_hidden_layers")
    types = layer.get("layer_types")
    named = types is not None
    types = types if named else [FULL] * num_layers
    if not isinstance(types, list) or len(types) != num_layers:
        raise layer.error(
            "layer_types", f"must be a list of {num_layers}, as there are layers, not {types!r}"
        )
    for kind in types:
        if kind not in (SLIDING, FULL):
            raise layer.unsupported("layer_types", f"a layer of type {kind!r}")
    slides = [kind == SLIDING for kind in types]
    if dflash.flag("use_swa"):
        if any(slides) and not all(slides):
            raise dflash.unsupported(
                "use_swa",
                "true, but layer_types has full attention too: whose windows are meant? Leave it "
                "out if it is only those that layer_types calls sliding",
            )
        slides = [True] * num_layers
    elif not named:
        _refuse_unplaced_window(layer)
    if any(slides):
        window = _window(layer, dflash)
        return types, [window if each else None for each in slides]
    if dflash.get("swa_window_size") is not None and dflash.get("use_swa") is None:
        raise dflash.unsupported(
            "swa_window_size", "in which layers? Say so by use_swa, or by layer_types"
        )
    return types, [None] * num_layers


def _refuse_unplaced_window(layer: Fields) -> None:
    """Refuse windows of which nothing says whose they are."""
    uses = layer.get("use_sliding_window") is not None and layer.flag("use_sliding_window")
    unsaid = layer.get("use_sliding_window") is None and layer.get("sliding_window") is not None
    if uses or unsaid:
        raise layer.unsupported(
            "use_sliding_window" if uses else "sliding_window",
            f"in which layers? Say so by layer_types, {SLIDING} or {FULL} for each",
        )


def _window(layer: Fields, dflash: Fields) -> int:
    """Tokens of the sliding layers' window."""
    if dflash.get("swa_window_size") is None:
        if layer.get("use_sliding_window") is not None and not layer.flag("use_sliding_window"):
            raise layer.error("use_sliding_window", "false, but there are layers that slide")
        return layer.integer("sliding_window")
    window = dflash.integer("swa_window_size")
    if (outer := layer.integer("sliding_window", default=window)) != window:
        raise layer.error("sliding_window", f"{outer}, but dflash_config.swa_window_size {window}")
    return window


def _default_taps(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """As many taps as the drafter has layers, evenly from 1 to the target's last but two."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_layers))


def _check_taps(where: Fields, field: str, taps: tuple[int, ...], num_layers: int) -> None:
    if num_layers - 1 in taps:
        raise where.unsupported(
            field,
            f"the output of the last layer ({num_layers - 1}), before or after the final norm",
        )
    check_taps(where, field, taps, num_layers)


def _names(files: Names, *, reduced: bool) -> dict[str, str]:
    """See DFlashSpec.names; `reduced`: the head has fewer ids than the target."""
    found = {
        "layers": files.place("layers"),
        "fc": files.place("fc", "encoder.fc"),
        "hidden_norm": files.place("hidden_norm", "encoder.output_norm_enc"),
        "final_norm": files.place("norm"),
    }
    # The tensor's whole name: most files have it without ".weight".
    mask = ("mask_embedding.weight", "mask_embedding")
    found |= files.optional("mask_embedding", *mask, needed=False)
    found |= files.optional("embedding", "embed_tokens", needed=False)
    found |= files.optional("head", "lm_head", needed=reduced)
    found |= files.optional("d2t", "d2t", needed=reduced)
    return found | files.optional("t2d", "t2d", needed=False)


def _mask_token_id(
    path: Path, fields: Fields, dflash: Fields, names: dict[str, str], target: ModelSpec
) -> int | None:
    """The row of the embedding for what is not known; None: there is a tensor for it.

    Files that have such a tensor may name an id too, for readers that put the tensor in its place.
    """
    if "mask_embedding" in names:
        return None
    if (pickled := path / "mask_embedding.pt").exists():
        raise Unsupported(
            f"{pickled}: a pickled mask embedding; put it into the safetensors files as "
            "mask_embedding",
            "mask_embedding",
        )
    name = "mask_token_id"
    where = _one_of(fields, dflash, name)
    if where.get(name) is None and dflash.get("mask_token") is not None:
        raise dflash.unsupported(
            "mask_token", f"{dflash.get('mask_token')!r} without mask_token_id: set the id"
        )
    token_id = where.integer(name, least=0)
    if token_id >= target.vocab_size:
        raise where.error(
            name, f"{token_id} is outside of the target's vocabulary, {target.vocab_size} ids"
        )
    return token_id
