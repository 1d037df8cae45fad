"""Read the directory of a drafter with weights into one checked record. Free of torch."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from worker.config import SpecConfig
from worker.config.checkpoint.fields import Fields
from worker.config.checkpoint.mask import KeyMask
from worker.config.checkpoint.shape import ModelShape, read_dtype
from worker.config.checkpoint.windows import FULL, SLIDING
from worker.drafts.draft_file import DrafterFile
from worker.drafts.draft_forms import OF_TARGET
from worker.drafts.drafter_shape import ChainShape, DFlashShape, DrafterShape
from worker.errors import Unsupported, UserError

IDS, FUSES = "eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"


def read_chain_shape(path: Path, target: ModelShape, drafter: str = "chain") -> ChainShape:
    """The chain drafter in directory `path`, which may be the target's own, for `target`.

    drafter: as spec.drafter; "mtp": a layer of the target's own alone.


    Raises UserError, which names file and field, if one is missing or wrong, or the drafter is
    another target's; Unsupported if we cannot compute it, or a field is unknown or ambiguous.
    """
    file = DrafterFile.open(path, drafter, target)
    fields, layer, kind = file.fields, file.layer, file.form.kind
    assert kind is not None
    shape = file.shape()
    fuses = kind == "eagle3" and fields.flag(f"eagle_config.{FUSES}", default=True)
    wanted = 1
    if kind == "mtp":
        _check_depth(file)
        wanted = target.num_layers
    if (number := layer.integer("num_hidden_layers")) != wanted:
        raise layer.unsupported("num_hidden_layers", f"{number}; supported: {wanted}")
    if shape["hidden_size"] != target.hidden_size and not fuses:
        raise layer.error(
            "hidden_size", f"{shape['hidden_size']}, but the target's is {target.hidden_size}, "
            f"and without {FUSES} nothing projects one to the other", OF_TARGET,
        )  # fmt: skip
    if "eagle_config" in file.form.objects:
        shape["norm_output"] = _norm_output(fields)
    return ChainShape(
        **shape,
        form=kind,
        taps=_chain_taps(file, fuses=fuses),
        names=file.names(shape, without=_absent_parts(fields, fuses=fuses)),
    )


def _check_depth(file: DrafterFile) -> None:
    """Refuse files with another number of layers that draft than one."""
    layer, names = file.layer, ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    if not file.form.is_hybrid:  # other files say so by their tensors alone
        layer.integer(names[1], least=0)
    remedy = "many quantised or tuned copies lack it: take the original's files"
    remedy += ", or set spec.drafter to ngram"
    for name in names:
        if layer.get(name) is not None and (number := layer.integer(name, least=0)) != 1:
            text = f"{number}; supported: 1" if number else f"0: no layer drafts; {remedy}"
            raise layer.unsupported(name, text)
    at, tensors = file.form.parts["layer"], file.tensors
    if tensors and not any(name.startswith(f"{at}.") for name in tensors):
        text = f"{file.path}: no tensor is named {at}.*, so no layer drafts"
        raise Unsupported(f"{text}; {remedy}", "spec.drafter")


def _norm_output(fields: Fields) -> bool:
    """Is the normed output fed back?

    Early SpecForge meant by `norm_output` whether the head takes the normed output, and never fed
    that back; everybody else means what is fed back. TensorRT-LLM's field has one meaning.
    """
    name, fed_back = "norm_output", "eagle_config.return_hidden_post_norm"
    if fields.get(name) is not None:
        if fields.get(fed_back) is None:
            raise fields.unsupported(
                name,
                "has two meanings: the head takes the normed output (early SpecForge), or the "
                "normed output is fed back",
                f"set {fed_back} to say whether it is fed back",
            )
        if fields.flag(fed_back) and not fields.flag(name):
            raise fields.error(name, f"false, but {fed_back} true")
    return fields.flag(fed_back)


def _absent_parts(fields: Fields, *, fuses: bool) -> set[str]:
    one_by_one = fields.flag("fc_norm")
    together = fields.flag("norm_before_fc") or fields.flag("eagle_config.norm_before_fc")
    if one_by_one and together:
        raise fields.error("fc_norm", "excludes norm_before_fc, but both are true")
    if (one_by_one or together) and not fuses:
        name = "fc_norm" if one_by_one else "norm_before_fc"
        raise fields.error(name, f"norms what fc fuses, but {FUSES} is false")
    has = {"fc": fuses, "fc_norm": one_by_one, "input_norm": together}
    return {part for part, is_there in has.items() if not is_there}


def _chain_taps(file: DrafterFile, *, fuses: bool) -> tuple[int, ...]:
    """Which of the target's layers are tapped, in the one convention of DrafterShape.

    In `eagle_config` an id means the output of that layer, at the top level its input.
    """
    fields, num_layers, nested = file.fields, file.target.num_layers, f"eagle_config.{IDS}"
    outputs, inputs = fields.integers(nested), fields.integers(IDS)
    name = nested if outputs else IDS
    if not fuses:
        if outputs or inputs:
            raise fields.error(name, f"eagle_config.{FUSES} is false")
        return (num_layers,)
    shifted = [layer - 1 for layer in inputs]
    if outputs and inputs and outputs != shifted:
        raise fields.error(
            IDS, f"{inputs} are the inputs of layers, {nested} {outputs} the outputs, and these "
            "are not the same",
        )  # fmt: skip
    taps = tuple(outputs or shifted) or (1, num_layers // 2 - 1, num_layers - 4)
    file.check_taps(name, taps, last=not inputs)
    if fields.integer("num_aux_hidden_states", default=len(taps)) != len(taps):
        raise fields.error("num_aux_hidden_states", f"must be {len(taps)}: one a layer id")
    return taps


def read_dflash_shape(path: Path, target: ModelShape) -> DFlashShape:
    """The DFlash drafter in directory `path`, for `target`; raises as `read_chain_shape`."""
    file = DrafterFile.open(path, "dflash", target)
    fields = file.fields
    shape = file.shape()
    if fields.get("dtype", "torch_dtype") is not None:
        shape["dtype"] = read_dtype(fields)
    depth = "dflash_config.num_target_layers", "num_target_layers"
    if fields.get(*depth) is not None:
        file.check_equal(fields, target.num_layers, *depth)
    nested = [f"{file.form.layer}.num_hidden_layers"] if file.form.layer else []
    num_layers = fields.integer("num_hidden_layers", *nested)
    masks = _masks(file, num_layers)
    names = file.names(shape)
    return DFlashShape(
        **shape,
        num_layers=num_layers,
        block_size=fields.integer("dflash_config.block_size", "block_size", least=2),
        masks=masks,
        mask_token_id=None if "mask_embedding" in names else _mask_token_id(file),
        taps=_dflash_taps(file, num_layers),
        names=names,
    )


def _masks(file: DrafterFile, num_layers: int) -> tuple[KeyMask, ...]:
    """Which keys each layer's rows see. By default only sliding layers are causal."""
    fields, layer, name = file.fields, file.layer, "sliding_window_non_causal"
    types = layer.get("layer_types")
    types = [FULL] * num_layers if types is None else types
    if not isinstance(types, list) or len(types) != num_layers:
        raise layer.error(
            "layer_types", f"must be a list of {num_layers}, one a layer, not {types!r}"
        )
    for kind in types:
        if kind not in (SLIDING, FULL):
            raise layer.unsupported("layer_types", f"a layer of type {kind!r}")
    windows = _windows(file, [kind == SLIDING for kind in types])
    causal = None
    if file.form.layer:
        if SLIDING in types and fields.get(name) is None:
            raise fields.unsupported(
                name, "missing: speculators takes it as false then, others as true", "set it"
            )
        causal = False if fields.flag(name) else None
    elif fields.get("dflash_config.causal", "is_causal") is not None:
        causal = fields.flag("dflash_config.causal", "is_causal")
    return tuple(
        KeyMask(causal=kind == SLIDING if causal is None else causal, window=window)
        for kind, window in zip(types, windows, strict=True)
    )


def _windows(file: DrafterFile, slides: list[bool]) -> list[int | None]:
    """Tokens of each layer's window; None: it sees all. slides: by layer_types, of each layer.

    `dflash_config.use_swa` gives every layer a window and leaves its type, so its causality, alone.
    """
    fields, layer = file.fields, file.layer
    swa_size, uses = "dflash_config.swa_window_size", layer.get("use_sliding_window")
    if fields.flag("dflash_config.use_swa"):
        if any(slides) and not all(slides):
            raise fields.unsupported(
                "dflash_config.use_swa",
                "true, but layer_types has full attention too. Leave it out if only those layers "
                "have windows that layer_types calls sliding",
                f"or set layer_types to {SLIDING} for all",
            )
        slides = [True] * len(slides)
    elif layer.get("layer_types") is None:
        unplaced = "sliding_window" if uses is None else "use_sliding_window"
        if layer.flag("use_sliding_window") or (uses is None and layer.get(unplaced) is not None):
            remedy = f"set layer_types, to {SLIDING} or {FULL} for each"
            raise layer.unsupported(unplaced, "in which layers?", remedy)
    if not any(slides):
        if fields.get(swa_size) is not None and fields.get("dflash_config.use_swa") is None:
            raise fields.unsupported(swa_size, "in which layers?", "set use_swa, or layer_types")
        return [None] * len(slides)
    if fields.get(swa_size) is not None:  # only where the layers' fields stand in the file itself
        window = fields.integer(swa_size, "sliding_window")
    else:
        if uses is not None and not layer.flag("use_sliding_window"):
            raise layer.error("use_sliding_window", "false, but there are layers that slide")
        window = layer.integer("sliding_window")
    return [window if is_sliding else None for is_sliding in slides]


def _dflash_taps(file: DrafterFile, num_layers: int) -> tuple[int, ...]:
    """The target's layers that are tapped; by default one per drafter layer, evenly from 1 to the
    target's last but two."""
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
    file.check_taps(name, taps, last=False)
    return taps


def _mask_token_id(file: DrafterFile) -> int:
    """The mask token's id, of a drafter without a mask embedding of its own.

    Files that have such a tensor may name an id too, for readers that put the tensor in its place.
    """
    if (pickled := file.path / "mask_embedding.pt").exists():
        raise Unsupported(
            f"{pickled}: a pickled mask embedding; put it into the safetensors files as "
            "mask_embedding, or take a drafter that has it there",
            "mask_embedding",
        )
    fields, places = file.fields, ("dflash_config.mask_token_id", "mask_token_id")
    text = fields.get("dflash_config.mask_token")
    if fields.get(*places) is None and text is not None:
        problem = f"{text!r} without mask_token_id"
        raise fields.unsupported("dflash_config.mask_token", problem, "set the id")
    token_id = fields.integer(*places, least=0)
    if token_id >= file.target.vocab_size:
        where, field = fields.place(*places)
        problem = f"{token_id} is outside of the target's vocabulary, {file.target.vocab_size} ids"
        raise where.error(field, problem, OF_TARGET)
    return token_id


# spec.drafter -> who reads the directory of one, for a target.
READERS: Mapping[str, Callable[[Path, ModelShape], DrafterShape]] = {
    "chain": read_chain_shape,
    "mtp": partial(read_chain_shape, drafter="mtp"),
    "dflash": read_dflash_shape,
}


def check_block(asked: SpecConfig, shape: DrafterShape) -> None:
    """Refuse windows and blocks that are longer than a block of the drafter, by a UserError."""
    if not isinstance(shape, DFlashShape):
        return
    widths = [] if asked.widths == "auto" else asked.widths
    for name, value in (("widths", max(widths, default=0)), ("block", asked.block)):
        if value > shape.block_size:
            raise UserError(
                f"spec.{name}: {value}, but the drafter's block has {shape.block_size} tokens; "
                "set it to as many at most",
                f"spec.{name}",
            )
