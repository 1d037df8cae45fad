"""What a GGUF file says of its model, as the fields of a config.json.

Facts of the form are those of llama.cpp, `conversion/` and `src/models/`: what its converter
leaves out because the architecture implies it is filled in here.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from worker.config.checkpoint.fields import Fields, is_list
from worker.config.checkpoint.refusals import unquantized
from worker.config.checkpoint.windows import FULL, SLIDING
from worker.config.gguf.file import Header
from worker.errors import Unsupported


class Architecture(NamedTuple):
    """One that is read."""

    served_as: str  # a key of FAMILIES
    model_type: str  # as transformers calls it
    # Rows of q and k lie so that rope turns numbers 2i and 2i + 1 of a head, not i and i + half.
    in_pairs: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", in_pairs=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text"),
}
READ = "read are GGUF files of " + ", ".join(ARCHITECTURES)
# Keys behind the architecture's name, and the fields of config.json of the same meaning.
SAME = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
OPTIONAL = ("attention.head_count_kv", "rope.freq_base")
# Others that are read, or that follow from what is.
KNOWN = (
    *("vocab_size", "attention.key_length", "attention.value_length", "attention.causal"),
    "rope.dimension_count",
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scaling.yarn_attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
OF_GEMMA = (
    *("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"),
    "final_logit_softcapping",
)
ROPE_FACTORS = "rope_freqs.weight"  # f32, by which Llama 3 slows its rotated pairs down
PATTERN = 6  # of Gemma 3: every sixth layer has no window
LOCAL_THETA = 10_000.0  # of its layers with one
LAYERS_OF_27B = 62  # whose scores alone are not scaled by the head's width
# general.type of files that are no model, and what they are.
PARTS = {"adapter": "a LoRA", "mmproj": "the part of a model for images or sound"}
# Of general.sampling, and the fields of generation_config.json.
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def config_of(header: Header) -> dict[str, Any]:
    """The fields of config.json but those of the vocabulary.

    Raises Unsupported for another architecture, and for what no layer of ours has; UserError for a
    key that is missing or wrong. Both name the key.
    """
    name = architecture_of(header)
    row, fields = ARCHITECTURES[name], Fields(header.path, _nested(header, name), f"{name}.")
    _refuse_unknown(header, name, fields)
    config: dict[str, Any] = {
        "architectures": [row.served_as],
        "model_type": row.model_type,
        "dtype": _dtype(header),
        "head_dim": _head_dim(fields),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for key, field in SAME.items():
        read = fields.integer if field not in ("rms_norm_eps", "rope_theta") else fields.number
        if key not in OPTIONAL or fields.get(key) is not None:
            config[field] = read(key)
    if name != "qwen2":  # whose file says nothing of its bias
        config |= _biases(header)
    config["rope_scaling"] = _scaling(header, fields)
    return config | (_gemma(fields, config) if name == "gemma3" else {})


def sampling_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of generation_config.json."""
    given = {field: metadata.get(f"general.sampling.{key}") for key, field in SAMPLING.items()}
    return {field: value for field, value in given.items() if value is not None}


def architecture_of(header: Header) -> str:
    """A key of ARCHITECTURES; raises Unsupported for any other, and for no model."""
    path, metadata = header.path, header.metadata
    name = str(metadata.get("general.architecture"))
    kind = str(metadata.get("general.type", "model"))
    if kind in PARTS or name == "clip":
        what = PARTS.get(kind, PARTS["mmproj"])
        raise Unsupported(f"{path}: general.type: {what}; take the model's own file")
    if name not in ARCHITECTURES:
        origin = metadata.get("general.base_model.0.repo_url") or unquantized(path)
        text = f"general.architecture: {name!r}; {READ}: take the safetensors, of {origin}"
        raise Unsupported(f"{path}: {text}")
    if "token_embd.weight" not in header.tensors:
        raise Unsupported(f"{path}: no tensor token_embd.weight: a vocabulary without a model")
    return name


def _nested(header: Header, name: str) -> dict[str, Any]:
    """The values below the architecture's name, an object for every dot in a key."""
    found = dict[str, Any]()
    for key, value in header.metadata.items():
        if key.startswith(f"{name}."):
            *outer, last = key.split(".")[1:]
            place = found
            for part in outer:
                inner = place.get(part)
                place[part] = inner if isinstance(inner, dict) else {}
                place = cast("dict[str, Any]", place[part])
            place[last] = value
    return found


def _refuse_unknown(header: Header, name: str, fields: Fields) -> None:
    known = {*SAME, *KNOWN, *(OF_GEMMA if name == "gemma3" else ())}
    for full, value in header.metadata.items():
        key = full.removeprefix(f"{name}.")
        if key != full and key not in known and value:
            instead = f"take the safetensors, of {unquantized(header.path)}"
            raise fields.unsupported(key, f"{value!r}, which is not known here: {instead}")
    if not fields.flag("attention.causal", default=True):
        raise fields.unsupported("attention.causal", "it embeds texts; take a model that continues")


def _dtype(header: Header) -> str:
    """What a GPU computes in. Weights in blocks have no dtype; bfloat16 holds them in any range."""
    kinds = {x.type_name for x in header.tensors.values() if len(x.shape) > 1}
    alike = kinds.pop() if len(kinds) == 1 else ""
    return {"F32": "float32", "F16": "float16"}.get(alike, "bfloat16")


def _biases(header: Header) -> dict[str, bool]:
    names = [f"blk.0.attn_{part}.bias" for part in ("q", "k", "v", "output")]
    has = {name in header.tensors for name in names}
    if len(has) > 1:
        raise Unsupported(f"{header.path}: of {', '.join(names)} some are there and some are not")
    return {"attention_bias": True in has, "mlp_bias": "blk.0.ffn_up.bias" in header.tensors}


def _head_dim(fields: Fields) -> int:
    heads = fields.integer("embedding_length") // fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", default=heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if (value := fields.integer(key, default=head_dim)) != head_dim:
            problem = f"{value}, and heads have {head_dim} numbers; take its safetensors"
            raise fields.unsupported(key, problem)
    return head_dim


def _scaling(header: Header, fields: Fields) -> dict[str, Any] | None:
    """`rope_scaling` of config.json."""
    kind = fields.get("rope.scaling.type") or "none"
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise fields.unsupported("rope.scaling.type", f"{kind!r} beside {ROPE_FACTORS}")
        factors = [*_factors(header)]
        # With one set for all lengths: the frequencies of `llama3`, however they were computed.
        return {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
            "attention_factor": 1.0, "factor": 1.0,
            "original_max_position_embeddings": fields.integer("context_length"),
        }  # fmt: skip
    for key, value, read in (
        ("type", kind, ("none", "linear", "yarn")),
        ("attn_factor", fields.get("rope.scaling.attn_factor"), (None, 1.0)),
    ):
        if value not in read:
            raise fields.unsupported(f"rope.scaling.{key}", f"{value!r}; take its safetensors")
    if kind == "none":
        return None
    found = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    for key, field in (
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if (value := fields.get(f"rope.scaling.{key}")) is not None:
            found[field] = value
    return found


def _factors(header: Header) -> Iterator[float]:
    stored = header.tensors[ROPE_FACTORS]
    if stored.type_name != "F32":
        raise Unsupported(f"{header.path}: {ROPE_FACTORS} is of type {stored.type_name}, not F32")
    with stored.path.open("rb") as file:
        file.seek(stored.offset)
        yield from struct.unpack(f"<{stored.shape[0]}f", file.read(4 * stored.shape[0]))


def _gemma(fields: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    window = fields.integer("attention.sliding_window", default=0, least=0)
    pattern = fields.get("attention.sliding_window_pattern") or PATTERN
    slides = pattern if is_list(pattern) else [(i + 1) % pattern for i in range(num_layers)]
    large = num_layers == LAYERS_OF_27B
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // heads if large else config["head_dim"],
        "sliding_window": window or None,
        "layer_types": [SLIDING if window and slide else FULL for slide in slides],
        "rope_local_base_freq": fields.number("rope.freq_base_swa", default=LOCAL_THETA),
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
    }
