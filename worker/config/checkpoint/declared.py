"""Where a checkpoint says that its matrices are in another format. Free of torch.

Of several places the first counts, as for vLLM and SGLang: config.json's object, that of the text
model in it, an older name, a file beside it.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from worker.config.checkpoint.fields import Fields, is_list, is_object, read_fields
from worker.config.checkpoint.refusals import READ, unquantized
from worker.errors import Unsupported

# Fields of config.json with such an object -> who writes it, where it does not say so.
PLACES: Mapping[str, str] = {
    "quantization_config": "", "compression_config": "compressed-tensors", "quantization": "mlx",
}  # fmt: skip
# Files beside it -> (the object within, who writes it).
FILES: Mapping[str, tuple[str, str]] = {
    "hf_quant_config.json": ("quantization", "modelopt"),
    "quantize_config.json": ("", "gptq"),
    "quant_config.json": ("", "awq"),
    "quantization_config.json": ("", ""),
    "quant_model_description*.json": ("", "Ascend"),
    "quanto_qmap.json": ("", "quanto"),
    "quantization_map.json": ("", "quanto"),
    "smash_config.json": ("", "Pruna"),
}
# Fields by which an object without `quant_method` tells who has written it.
WRITERS: Mapping[str, str] = {
    "quant_algo": "modelopt", "config_groups": "compressed-tensors", "w_bit": "awq",
    "load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes", "desc_act": "gptq",
    "mode": "mlx",
}  # fmt: skip
UPPER = ("aqlm", "awq", "fp8", "gguf", "gptq", "hqq", "mlx", "mxfp4", "mxfp8", "nvfp4", "vptq")
OTHER_FIELDS = re.compile("quant|compress|rotat")  # that speak of formats, by names nobody knows
OF_KV = "kv_cache_scheme", "kv_cache_quant_algo"
COMPANIONS = ("sparsity_config", "transform_config")
# Where compressed-tensors' transforms are made as the model runs, not once, of its weights.
ONLINE = {"input", "output", "k_cache", "q_attn"}


class Declared(NamedTuple):
    """An object that says how matrices are stored."""

    method: str  # as `quant_method` has it, or by who writes such objects; "": not known
    held: Fields
    is_said: bool  # by `quant_method`
    remedy: str  # what to take or do instead

    def refused(self) -> Unsupported:
        """The error for a format that is not read."""
        name = self.method.upper() if self.method in UPPER else self.method
        if not self.is_said:  # so it is a guess
            name = f"quantized ({name})" if name else "quantized"
        file = Fields(self.held.path, {}, remedy=self.remedy)
        field = self.held.prefix.removesuffix(".") or "quant_method"
        return file.unsupported(field, f"{name} weights; {READ}")


def declared(*sources: Fields) -> Declared | None:
    """The object that counts; None: all matrices are in the model's dtype.

    sources: objects of config.json, the whole first. Raises Unsupported where they speak of what
    belongs to a format and is not computed, or by a name that is not known.
    """
    found = next(_declarations(sources), None)
    for fields in (*sources, *([] if found is None else [found.held])):
        _refuse_companions(fields)
    for fields in sources:
        for field, value in fields.values.items():
            if value and field not in (*PLACES, *COMPANIONS) and OTHER_FIELDS.search(field.lower()):
                problem = f"speaks of weights or activations in a format that is not known; {READ}"
                raise fields.unsupported(field, problem, f"take {unquantized(fields.path)}")
    return found


def kv_field(path: Path) -> str:
    """The field by which the checkpoint in a directory asks for KV in a format; "": none does."""
    if not (path / "config.json").exists():
        return ""
    whole = read_fields(path / "config.json")
    found = next(_declarations((whole, whole.inner("text_config"))), None)
    held = whole if found is None else found.held
    return next((held.prefix + field for field in OF_KV if held.get(field)), "")


def _declarations(sources: tuple[Fields, ...]) -> Iterator[Declared]:
    places = product(PLACES.items(), sources)
    found = [_declared(x.inner(field), who) for (field, who), x in places if x.get(field)]
    yield from sorted(found, key=lambda one: (not one.is_said, not one.method))
    for pattern, (field, writer) in FILES.items():
        for path in sorted(sources[0].path.parent.glob(pattern)):
            whole = read_fields(path)
            more = f"; or remove {path.name} if the weights are in 16 bits"
            yield _declared(whole.inner(field) if field else whole, writer, more)


def _declared(held: Fields, writer: str, more: str = "") -> Declared:
    method, remedy = held.get("quant_method"), f"take {unquantized(held.path)}{more}"
    if not isinstance(method, str):
        found = (whose for field, whose in WRITERS.items() if held.get(field) is not None)
        return Declared(next(found, writer), held, False, remedy)
    method = "modelopt" if method.startswith("modelopt") else method
    return Declared(method, held, True, remedy)


def _refuse_companions(fields: Fields) -> None:
    remedy = f"take {unquantized(fields.path)}"
    fields.inner("sparsity_config").choice("format", ("dense",), f"{READ}: {remedy}")
    groups = fields.inner("transform_config").inner("config_groups")
    for name in groups.values:
        made = groups.inner(name).get("apply")
        if is_list(made) and any(is_object(x) and x.get("location") in ONLINE for x in made):
            problem = "activations are transformed as the model runs, which is not computed here"
            raise fields.unsupported("transform_config", problem, remedy)
