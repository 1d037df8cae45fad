"""Read a chain drafter's directory into one checked record. Free of torch."""

from pathlib import Path

from worker.drafts.draft_reading import DrafterFile
from worker.drafts.drafter_shape import ChainShape
from worker.model.fields import Fields
from worker.model.shape import ModelShape

IDS = "eagle_aux_hidden_state_layer_ids"
FUSES = "use_aux_hidden_state"


def read_chain_shape(path: Path, target: ModelShape) -> ChainShape:
    """The drafter in directory `path`, which may be the target's own, for `target`.

    Raises:
        UserError: a file or a field is missing or wrong, or the drafter is another target's; the
            message names file and field. Unsupported (a UserError): it uses what we cannot
            compute, or a field has two readings or is unknown.
    """
    file = DrafterFile.open(path, "chain", target)
    fields, layer, kind = file.fields, file.layer, file.form.kind
    assert kind is not None
    shape = file.shape()
    fuses = kind == "eagle3" and fields.flag(f"eagle_config.{FUSES}", default=True)
    wanted = 1
    if kind == "mtp":
        fields.integer("num_nextn_predict_layers")
        wanted = target.num_layers
    if (number := layer.integer("num_hidden_layers")) != wanted:
        raise layer.unsupported("num_hidden_layers", f"{number}; supported: {wanted}")
    if shape["hidden_size"] != target.hidden_size and not fuses:
        raise layer.error(
            "hidden_size", f"{shape['hidden_size']}, but the target's is {target.hidden_size}, "
            f"and without {FUSES} nothing projects one to the other",
        )  # fmt: skip
    if "eagle_config" in file.form.objects:
        shape["norm_output"] = _norm_output(fields)
    return ChainShape(
        **shape,
        form=kind,
        taps=_taps(file) if fuses else _tap_of_output(file),
        names=file.names(shape, without=_absent_parts(fields, fuses=fuses)),
    )


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
                f"normed output is fed back; set {fed_back} to say whether it is fed back",
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


def _tap_of_output(file: DrafterFile) -> tuple[int, ...]:
    for name in (f"eagle_config.{IDS}", IDS):
        if file.fields.integers(name):
            raise file.fields.error(name, f"eagle_config.{FUSES} is false")
    return (file.target.num_layers,)


def _taps(file: DrafterFile) -> tuple[int, ...]:
    """Which of the target's layers are tapped, in the one convention of ChainShape.

    In `eagle_config` an id means the output of that layer, at the top level its input.
    """
    fields, num_layers = file.fields, file.target.num_layers
    outputs, inputs = fields.integers(f"eagle_config.{IDS}"), fields.integers(IDS)
    shifted = [layer - 1 for layer in inputs]
    if outputs and inputs and outputs != shifted:
        raise fields.error(
            IDS, f"{inputs} are the inputs of layers, eagle_config.{IDS} {outputs} the outputs, "
            "and these are not the same",
        )  # fmt: skip
    taps = tuple(outputs or shifted) or (1, num_layers // 2 - 1, num_layers - 4)
    name = f"eagle_config.{IDS}" if outputs else IDS
    file.check_taps(fields, name, taps, last=not inputs)
    if fields.integer("num_aux_hidden_states", default=len(taps)) != len(taps):
        raise fields.error("num_aux_hidden_states", f"must be {len(taps)}: one a layer id")
    return taps
