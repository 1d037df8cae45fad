"""Llama 2, 3.x and the models that share their architecture name."""

from __future__ import annotations

from worker.model.decoder import Decoder, Features
from worker.model.shape import ModelSpec


class LlamaForCausalLM(Decoder):
    """The plain decoder; `attention_bias` puts a bias on all four attention projections.

    `qk_norm` is no field of Llama's own: derived checkpoints that set it carry Qwen3's norms.
    """

    @staticmethod
    def features(spec: ModelSpec) -> Features:
        """See Decoder.features."""
        bias = spec.attention_bias
        return Features(qkv_bias=bias, output_bias=bias, qk_norm=spec.qk_norm)
