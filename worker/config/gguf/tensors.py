"""The tensors of a GGUF file under the names of the checkpoint that it was made from."""

from collections.abc import Mapping
from pathlib import Path

from worker.config.checkpoint.families import FAMILIES
from worker.config.gguf.file import Header, Stored
from worker.config.gguf.model import ROPE_FACTORS
from worker.errors import Unsupported

OUTER = {"token_embd": "embed_tokens", "output_norm": "norm"}
INNER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def tensors_of(header: Header, architecture: str) -> dict[str, Stored]:
    """By the checkpoint's names, but for what is part of config.json.

    architecture: of config.json. Raises Unsupported for a tensor that no such model has.
    """
    norms = FAMILIES[architecture].layers.norms
    inner = INNER | {
        "attn_norm": norms.attention_in, "post_attention_norm": norms.attention_out,
        "ffn_norm": norms.feed_forward_in, "post_ffw_norm": norms.feed_forward_out,
    }  # fmt: skip
    return {
        _name(header.path, name, inner): stored
        for name, stored in header.tensors.items()
        if name != ROPE_FACTORS
    }


def _name(path: Path, name: str, inner: Mapping[str, str]) -> str:
    stem, _, end = name.rpartition(".")
    if stem == "output":
        return f"lm_head.{end}"
    if module := OUTER.get(stem):
        return f"model.{module}.{end}"
    block, _, rest = stem.partition(".")
    number, _, rest = rest.partition(".")
    if block != "blk" or not inner.get(rest):
        text = f"{name}: a tensor that this architecture does not have here"
        raise Unsupported(f"{path}: {text}: take the safetensors that the file was made from")
    return f"model.layers.{number}.{inner[rest]}.{end}"
