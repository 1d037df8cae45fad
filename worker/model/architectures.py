"""The architectures that can be served: one row and one file each."""

from __future__ import annotations

from collections.abc import Mapping

# `architectures[0]` of config.json -> class; built as cls(spec, collective, device=, dtype=).
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "worker.model.llama:LlamaForCausalLM",
    "MiMoForCausalLM": "worker.model.qwen2:Qwen2ForCausalLM",  # Qwen2's, and a layer that drafts
    "Qwen2ForCausalLM": "worker.model.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "worker.model.qwen3:Qwen3ForCausalLM",
}
