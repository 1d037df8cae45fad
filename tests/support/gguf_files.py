"""GGUF files of models of `transformers`, written as llama.cpp's converter writes them.

By the writer, the names and the quantisation of the library `gguf`. What that cannot quantise are
random bytes in blocks whose scales are small.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
# Where the f16 scales of a block lie, of types that are not quantised here.
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}


@dataclass
class Words:
    """A vocabulary; keys: further ones, behind `tokenizer.`."""

    tokens: Sequence[str]
    model: str = "llama"
    pre: str = "default"
    types: Sequence[int] = ()
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types or [NORMAL] * len(self.tokens))
        if self.model == "llama":
            writer.add_token_scores(self.scores or [0.0] * len(self.tokens))
        if self.merges:
            writer.add_token_merges(self.merges)
        put(writer, {f"tokenizer.{key}": value for key, value in self.keys.items()})


def put(writer: gguf.GGUFWriter, keys: Mapping[str, Any]) -> None:
    """Of the types that converters use."""
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_string)(key, value)


def numbered(num: int) -> Words:
    return Words([f"t{i}" for i in range(num)], keys={"ggml.add_bos_token": False})


def stored(values: np.ndarray, kind: str) -> np.ndarray:
    """As the type has it; a row of bytes for each of rows."""
    if kind not in SCALES:
        return gguf.quantize(values, Kind[kind])
    block, num_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    shape = len(values), values.shape[1] // block, num_bytes
    blocks = np.random.default_rng(7).integers(0, 256, shape, np.uint8)
    for at in SCALES[kind]:
        blocks[..., at : at + 2] = np.full(1, 2e-4, np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as files of architecture llama have them."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def tensors(model: torch.nn.Module, architecture: str) -> dict[str, np.ndarray]:
    """By the file's names, f32."""
    config: Any = model.config
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, found = gguf.get_tensor_name_map(arch, config.num_hidden_layers), {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, module = tensor.float().numpy(), name.split(".")[-2]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if architecture == "llama" and module in heads:
            values = in_pairs(values, heads[module])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        found[names.get_name(name, (".weight", ".bias"))] = values
    return found


def metadata(config: Any, architecture: str) -> dict[str, Any]:
    """Behind the architecture's name."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope.get("rope_type") == "yarn":
        original = rope["original_max_position_embeddings"]
        found |= {"rope.scaling.original_context_length": original}
        found |= {f"rope.scaling.yarn_{key}": rope[key] for key in ("beta_fast", "beta_slow")}
    if architecture == "llama":
        found |= {"vocab_size": config.vocab_size, "rope.dimension_count": head_dim}
    if architecture == "gemma3":
        local = config.rope_parameters["sliding_attention"]["rope_theta"]
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        found |= {
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": slides,
            "rope.freq_base_swa": float(local),
            "final_logit_softcapping": config.final_logit_softcapping,
        }
    return found


def rope_factors(config: Any) -> np.ndarray | None:
    """Of a model with Llama 3's rope; else None."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    pairs = torch.arange(0, 2 * len(slowed), 2).float() / (2 * len(slowed))
    return (rope["rope_theta"] ** -pairs / slowed).numpy()


def write_model(
    path: Path,
    model: torch.nn.Module,
    architecture: str,
    *,
    kinds: Mapping[str, str] | str = "F32",
    words: Words | None = None,
    tensors_a_file: int = 0,
    keys: Mapping[str, Any] | None = None,
) -> None:
    """kinds: of matrices, all or by the end of their names; keys: further or other metadata."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_file)
    put(writer, {f"{architecture}.{k}": v for k, v in metadata(config, architecture).items()})
    put(writer, keys or {})
    (words or numbered(config.vocab_size)).add_to(writer)
    held = tensors(model, architecture)
    if (factors := rope_factors(config)) is not None:
        held["rope_freqs.weight"] = factors
    for name, values in held.items():
        kind = kinds if isinstance(kinds, str) else ""
        if isinstance(kinds, Mapping):
            kind = next((k for end, k in kinds.items() if name.endswith(f"{end}.weight")), "F32")
        kind = kind if values.ndim > 1 else "F32"
        writer.add_tensor(name, stored(values, kind), raw_dtype=Kind[kind])
    finish(writer)


def write_words(
    file: Path,
    words: Words,
    architecture: str = "llama",
    keys: Mapping[str, Any] | None = None,
    kind: str = "F32",
    **of_writer: Any,
) -> Path:
    """A vocabulary with no layer of a model: what is read before weights are is all there.

    keys: with other ones, or ones that are None left out; kind: of the embeddings.
    """
    writer = gguf.GGUFWriter(file, architecture, **of_writer)
    known = {
        "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
        "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    found = {f"{architecture}.{key}": value for key, value in known.items()} | dict(keys or {})
    put(writer, {key: value for key, value in found.items() if value is not None})
    words.add_to(writer)
    rows = np.zeros((len(words.tokens), 32), np.float32)
    writer.add_tensor("token_embd.weight", stored(rows, kind), raw_dtype=Kind[kind])
    finish(writer)
    return file


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_by_transformers(path: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a file by the names of `model`, dequantised by `transformers`."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
