"""Qwen3, dense."""

from __future__ import annotations

from worker.model.decoder import Decoder, Features
from worker.model.shape import ModelSpec


class Qwen3ForCausalLM(Decoder):
    """Always a norm on each head's q and k; biases only where `attention_bias` asks for them."""

    @staticmethod
    def features(spec: ModelSpec) -> Features:
        """See Decoder.features."""
        bias = spec.attention_bias
        return Features(qkv_bias=bias, output_bias=bias, qk_norm=True)
