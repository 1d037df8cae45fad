"""Read a DFlash drafter's directory into one checked record. Free of torch."""

from pathlib import Path

from worker.drafts.draft_reading import DrafterFile
from worker.drafts.drafter_shape import DFlashShape
from worker.errors import Unsupported
from worker.model.fields import Fields
from worker.model.shape import ModelShape, read_dtype
from worker.ops.mask import KeyMask

SLIDING, FULL = "sliding_attention", "full_attention"


def read_dflash_shape(path: Path, target: ModelShape) -> DFlashShape:
    """The DFlash drafter in directory `path`, for `target`; raises as `read_chain_shape`."""
    file = DrafterFile.open(path, "dflash", target)
    fields, layer = file.fields, file.layer
    shape = file.shape()
    if fields.get("dtype", "torch_dtype") is not None:
        shape["dtype"] = read_dtype(fields)
    depth = "dflash_config.num_target_layers", "num_target_layers"
    if fields.get(*depth) is not None:
        file.check_equal(fields, target.num_layers, *depth)
    nested = [f"{file.form.layer}.num_hidden_layers"] if file.form.layer else []
    num_layers = fields.integer("num_hidden_layers", *nested)
    types = _types(layer, num_layers)
    names = file.names(shape)
    return DFlashShape(
        **shape,
        num_layers=num_layers,
        block_size=fields.integer("dflash_config.block_size", "block_size", least=2),
        masks=_masks(file, types, _windows(file, types)),
        mask_token_id=None if "mask_embedding" in names else _mask_token_id(file),
        taps=_taps(file, num_layers),
        names=names,
    )


def _types(layer: Fields, num_layers: int) -> list[str]:
    types = layer.get("layer_types")
    types = [FULL] * num_layers if types is None else types
    if not isinstance(types, list) or len(types) != num_layers:
        raise layer.error(
            "layer_types", f"must be a list of {num_layers}, one a layer, not {types!r}"
        )
    for kind in types:
        if kind not in (SLIDING, FULL):
            raise layer.unsupported("layer_types", f"a layer of type {kind!r}")
    return types


def _windows(file: DrafterFile, types: list[str]) -> list[int | None]:
    """Tokens of each layer's window; None: it sees all.

    `dflash_config.use_swa` gives every layer a window and leaves its type, so its causality, alone.
    """
    fields, layer = file.fields, file.layer
    swa_size, uses = "dflash_config.swa_window_size", layer.get("use_sliding_window")
    slides = [kind == SLIDING for kind in types]
    if fields.flag("dflash_config.use_swa"):
        if any(slides) and not all(slides):
            raise fields.unsupported(
                "dflash_config.use_swa",
                "true, but layer_types has full attention too. Leave it out if only those layers "
                "have windows that layer_types calls sliding",
            )
        slides = [True] * len(types)
    elif layer.get("layer_types") is None:
        unplaced = "sliding_window" if uses is None else "use_sliding_window"
        if layer.flag("use_sliding_window") or (uses is None and layer.get(unplaced) is not None):
            raise layer.unsupported(
                unplaced, f"in which layers? Say so by layer_types, {SLIDING} or {FULL} for each"
            )
    if not any(slides):
        if fields.get(swa_size) is not None and fields.get("dflash_config.use_swa") is None:
            raise fields.unsupported(
                swa_size, "in which layers? Say so by use_swa, or by layer_types"
            )
        return [None] * len(types)
    if fields.get(swa_size) is not None:  # only where the layers' fields stand in the file itself
        window = fields.integer(swa_size, "sliding_window")
    else:
        if uses is not None and not layer.flag("use_sliding_window"):
            raise layer.error("use_sliding_window", "false, but there are layers that slide")
        window = layer.integer("sliding_window")
    return [window if is_sliding else None for is_sliding in slides]


def _masks(file: DrafterFile, types: list[str], windows: list[int | None]) -> tuple[KeyMask, ...]:
    """Which keys each layer's rows see. Unless the file says so, sliding layers are causal."""
    fields, name = file.fields, "sliding_window_non_causal"
    causal = None
    if file.form.layer:
        if SLIDING in types and fields.get(name) is None:
            raise fields.unsupported(
                name, "missing: speculators takes it as false then, others as true; set it"
            )
        causal = False if fields.flag(name) else None
    elif fields.get("dflash_config.causal", "is_causal") is not None:
        causal = fields.flag("dflash_config.causal", "is_causal")
    both = zip(types, windows, strict=True)
    return tuple(
        KeyMask(causal=kind == SLIDING if causal is None else causal, window=window)
        for kind, window in both
    )


def _taps(file: DrafterFile, num_layers: int) -> tuple[int, ...]:
    """After which of the target's layers; by default as many as the drafter has layers, evenly from
    1 to the target's last but two."""
    fields, num_target_layers = file.fields, file.target.num_layers
    if file.form.layer:
        name = "aux_hidden_state_layer_ids"
        if not (inputs := fields.integers(name)):
            raise fields.error(name, "missing: of which layers does the drafter take the inputs?")
        taps = tuple(layer - 1 for layer in inputs)
    else:
        name = "dflash_config.target_layer_ids"
        taps = tuple(fields.integers(name))
    if not taps and num_layers == 1:
        taps = (num_target_layers // 2,)
    elif not taps:
        step = (num_target_layers - 4) / (num_layers - 1)
        taps = tuple(round(1 + i * step) for i in range(num_layers))
    file.check_taps(fields, name, taps, last=False)
    return taps


def _mask_token_id(file: DrafterFile) -> int:
    """The mask token's id, of a drafter without a mask embedding of its own.

    Files that have such a tensor may name an id too, for readers that put the tensor in its place.
    """
    if (pickled := file.path / "mask_embedding.pt").exists():
        raise Unsupported(
            f"{pickled}: a pickled mask embedding; put it into the safetensors files as "
            "mask_embedding",
            "mask_embedding",
        )
    fields, places = file.fields, ("dflash_config.mask_token_id", "mask_token_id")
    text = fields.get("dflash_config.mask_token")
    if fields.get(*places) is None and text is not None:
        raise fields.unsupported(
            "dflash_config.mask_token", f"{text!r} without mask_token_id: set the id"
        )
    token_id = fields.integer(*places, least=0)
    if token_id >= file.target.vocab_size:
        where, field = fields.place(*places)
        raise where.error(
            field, f"{token_id} is outside of the target's vocabulary, {file.target.vocab_size} ids"
        )
    return token_id
