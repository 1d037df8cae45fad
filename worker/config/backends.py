"""The attention backends by name. Free of torch, so that a name is checked early."""

from collections.abc import Mapping

# Of layers with heads.
ATTENTION: Mapping[str, str] = {
    "reference": "worker.attention.reference:ReferenceAttention",
    "triton": "worker.attention.triton:TritonAttention",
    "flashinfer": "worker.attention.flashinfer:FlashInferAttention",
    "by_length": "worker.attention.by_length:ByLengthAttention",
}
# Of layers with latents.
LATENT: Mapping[str, str] = {
    "reference": "worker.attention.latent:LatentReference",
    "triton": "worker.attention.latent_triton:LatentTriton",
}
# By the kind of layers whose keys they read, a name of worker.model.kinds.KINDS.
BACKENDS: Mapping[str, Mapping[str, str]] = {"heads": ATTENTION, "latent": LATENT}
