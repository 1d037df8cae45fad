"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from worker.model.decoder import Decoder, Features
from worker.model.shape import ModelSpec


class Qwen2ForCausalLM(Decoder):
    """Always a bias on q, k and v, never on the output; config.json does not say so."""

    @staticmethod
    def features(spec: ModelSpec) -> Features:
        """See Decoder.features."""
        return Features(qkv_bias=True)
