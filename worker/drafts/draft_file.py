"""A drafter's config.json, read by the form that it has. Free of torch.

A wrong reading lowers acceptance without any error. So a field that no form has is refused, and so
is a value that we do not compute, or a field with two readings.
"""

import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from worker.config.checkpoint.class_defaults import with_class_defaults
from worker.config.checkpoint.experts import read_experts
from worker.config.checkpoint.families import FAMILIES
from worker.config.checkpoint.fields import Fields, read_fields
from worker.config.checkpoint.quantization import read_quantization
from worker.config.checkpoint.shape import (
    ModelShape,
    read_architecture,
    read_layer_shape,
    read_layers,
    refuse_what_we_cannot_compute,
)
from worker.config.checkpoint.windows import refuse_windows
from worker.drafts.draft_forms import (
    ANOTHER,
    DRAFTS,
    FORMS,
    HYBRID_ROPE,
    LATENT_ROPE,
    MISSING,
    OF_TARGET,
    ROPE,
    Form,
    Rules,
)
from worker.drafts.silent_fields import is_silent
from worker.weights.files import tensor_names


@dataclass(frozen=True, slots=True)
class DrafterFile:
    """A drafter's config.json, for a target."""

    path: Path  # of the directory
    fields: Fields
    layer: Fields  # the object with the transformer's fields
    form: Form
    architecture: str
    target: ModelShape
    tensors: Set[str]  # of the weight files, if there are any

    @classmethod
    def open(cls, path: Path, drafter: str, target: ModelShape) -> "DrafterFile":
        """Read the file of directory `path`; drafter: as spec.drafter.

        Raises UserError if it is broken; Unsupported if it is no `drafter`, or has unknown
        fields or values that we do not compute.
        """
        fields, field = read_fields(path / "config.json", ANOTHER), "speculators_model_type"
        if (name := fields.get(field)) is None:
            field, name = "architectures", read_architecture(fields)
        form = FORMS[field].get(str(name))
        if drafter == "mtp":
            if form is None or form.kind != "mtp":
                known = ", ".join(n for n, form in FORMS[field].items() if form.kind == "mtp")
                text = f"{name!r} has no layer that drafts, of a form that we know; known: {known}"
                raise fields.unsupported(field, text)
            drafter = form.drafter
        if form is None:
            if part := _missing_part(str(name)):
                own = target.architecture in FORMS["architectures"]
                remedy = f"set spec.drafter to mtp, the target's own layer; or {ANOTHER}"
                text = f"a drafter of {name} needs {part}"
                raise fields.unsupported(field, text, remedy if own else ANOTHER)
            known = ", ".join(n for n, form in FORMS[field].items() if form.drafter == drafter)
            raise fields.unsupported(field, f"{name!r} is no {drafter} drafter; supported: {known}")
        if form.drafter != drafter:
            problem = f"{name!r} drafts {DRAFTS[form.drafter]}: set spec.drafter to {form.drafter}"
            raise fields.unsupported(field, problem, "")
        form = form.of_target(target.num_layers)
        layer = fields.inner(form.layer) if form.layer else fields
        architecture = name if field == "architectures" else f"speculators' {name}"
        file = cls(path, fields, layer, form, architecture, target, tensor_names(path))
        fields.inner("speculators_config").choice("algorithm", (name,))
        for place, rules in form.objects.items():
            _check(fields.inner(place) if place else fields, rules)
        for place in ("rope_scaling", "rope_parameters"):
            rope = HYBRID_ROPE if form.is_hybrid else LATENT_ROPE if form.is_latent else ROPE
            _check(layer.inner(place), rope)
        for field, reason in form.needed.items():
            where = file._holder(field)
            if where.get(field, f"rope_parameters.{field}", f"rope_scaling.{field}") is None:
                raise where.unsupported(field, f"missing: {reason}", "set it")
        return file

    def shape(self) -> dict[str, Any]:
        """The fields of a DrafterShape but `taps` and `names`, and the form's flags."""
        fields, layer, target = self.fields, self.layer, self.target
        slides, hybrid = self.form.drafter == "dflash", self.form.is_hybrid
        refuse_what_we_cannot_compute(layer)
        read_quantization(fields, layer)
        if not (slides or hybrid):
            refuse_windows(layer)
        unused = slides or layer.get("use_sliding_window") is False
        if not unused and layer.get("sliding_window") is not None:
            raise layer.unsupported("sliding_window", "sliding-window attention")
        if layer.inner("rope_scaling").values and layer.inner("rope_parameters").values:
            raise layer.error("rope_scaling", "excludes rope_parameters, but there are both")
        layer.place("rope_parameters.rope_theta", "rope_theta")
        self.check_equal(layer, target.vocab_size, "vocab_size")
        if says_size := fields.get("target_hidden_size") is not None:
            self.check_equal(fields, target.hidden_size, "target_hidden_size")
        if not says_size or slides:  # else fc projects one size to the other
            self.check_equal(layer, target.hidden_size, "hidden_size")
        vocab_size = fields.integer("draft_vocab_size", default=target.vocab_size)
        if vocab_size > target.vocab_size:
            raise fields.error(
                "draft_vocab_size",
                f"{vocab_size} exceeds the target's vocabulary, {target.vocab_size}",
                OF_TARGET,
            )
        flags = {ours: self._flag(place) for ours, place in self.form.flags.items()}
        if layer.get("model_type") == "qwen3" and self.form.flags["qk_norm"] is not False:
            flags["qk_norm"] = True
        own: dict[str, Any] = {}
        sizes = partial(read_layer_shape, rotary=0.25 if hybrid else None)
        if self.form.kind == "mtp":  # a file of the target's leaves out what its class says
            layer = with_class_defaults(layer, self.architecture)
            own = self._own(layer)
            if self.form.is_latent:
                sizes = partial(read_layers, family=FAMILIES[self.architecture])
        return sizes(layer) | flags | own | {
            "architecture": self.architecture,
            "vocab_size": vocab_size,
            "target_vocab_size": target.vocab_size,
            "target_hidden_size": target.hidden_size,
        }  # fmt: skip

    def _own(self, layer: Fields) -> dict[str, Any]:
        """What the layer has as the target's others have it, in whose files it is."""
        family, experts = FAMILIES[self.architecture], None
        if family.layers.experts:
            experts = read_experts(layer, family).get("experts")
        router = f"{self.form.parts['layer']}{self.form.parts['feed_forward']}.gate.weight"
        # Files say by their tensors whether this one has experts, where not all of the others do.
        others = self.target.is_sparse[-1:] if self.form.is_latent else self.target.is_sparse
        is_sparse = router in self.tensors if self.tensors else all(others)
        own = experts if is_sparse else None
        return {"quantization": self.target.quantization, "experts": own}

    def _holder(self, field: str) -> Fields:
        """The object in which the form has the field."""
        return self.layer if field in self.form.objects[self.form.layer] else self.fields

    def _flag(self, place: str | bool) -> bool:
        if isinstance(place, bool):
            return place
        return self._holder(place).flag(place, default=place == "bias")  # true unless said

    def names(self, shape: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, str]:
        """Where the form's parts, but for `without`, stand in the weight files, if any."""
        tensors = self.tensors
        narrow = shape["hidden_size"] != shape["target_hidden_size"]
        reduced = shape["vocab_size"] != shape["target_vocab_size"]
        needed = {"embedding": narrow, "head": narrow or reduced, "d2t": reduced}

        def place(text: str) -> str:
            """The first option that prefixes a tensor, maybe after "model."; else option 0."""
            options = text.split("|")
            for name in (f"{outer}{option}" for option in options for outer in ("", "model.")):
                if any(f"{tensor}.".startswith(f"{name}.") for tensor in tensors):
                    return name
            return options[0]

        parts = {part: name for part, name in self.form.parts.items() if part not in without}
        at = place(parts.pop("layer", ""))
        names = {
            part: at + name if name.startswith(".") else place(name) for part, name in parts.items()
        }
        for part, options in self.form.own.items():
            name = place(options)
            if needed.get(part) or not tensors.isdisjoint((name, f"{name}.weight")):
                names[part] = name
        own = not {"head", "embedding"}.isdisjoint(names) or not self.target.tie_word_embeddings
        # A head of fewer ids cannot be an embedding, whatever the file says.
        if self.form.ties_head and not reduced and self.fields.flag("tie_word_embeddings") and own:
            raise self.fields.unsupported(
                "tie_word_embeddings",
                "a head that is the drafter's embedding",
                "set the field to false, and store lm_head and embed_tokens only if they are the "
                "drafter's own",
            )
        return names

    def check_taps(self, field: str, taps: Sequence[int], *, last: bool) -> None:
        """Refuse outputs of layers that the target lacks, or in another order.

        last: the output of the last layer may be among them.
        """
        end = self.target.num_layers - 1
        if not last and end in taps:
            problem = f"the output of the last layer ({end}), before or after the final norm"
        elif not all(0 <= layer <= end for layer in taps):
            problem = f"outputs of the layers {list(taps)}; the target's are 0 to {end}"
        elif list(taps) != sorted(set(taps)):
            problem = f"must be ascending, each layer once, not {list(taps)}"
        else:
            return
        raise self.fields.unsupported(field, problem)

    def check_equal(self, where: Fields, wanted: int, *places: str) -> None:
        """Raise UserError if the file's size of the target is not `wanted`."""
        if (size := where.integer(*places)) != wanted:
            where, field = where.place(*places)
            problem = f"{size}, but the target's is {wanted}: the drafter is another target's"
            raise where.error(field, problem, OF_TARGET)


def _check(where: Fields, rules: Rules) -> None:
    for field, value in where.values.items():
        if value is None or (field not in rules and is_silent(field)):
            continue
        if field not in rules:
            if part := _missing_part(field):
                raise where.unsupported(field, f"{value!r} asks for {part}")
            text = f"an unknown field, of value {value!r}: what a layer computes may follow from it"
            raise where.unsupported(field, f"{text}; take it out of the file if it does not")
        if (supported := rules[field]) is not None:
            where.choice(field, supported)


def _missing_part(name: str) -> str:
    return next((part for words, part in MISSING.items() if re.search(words, name.lower())), "")
