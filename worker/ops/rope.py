"""Rotary position embedding from a precomputed table, with the scalings of Llama 3 and "linear"."""

import math

import torch
from torch import Tensor

from worker.ops.scaling import RopeScaling


def rope_inv_freq(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each rotated pair: [head_dim / 2] f32 on the CPU.

    Su et al., "RoFormer" (arXiv:2104.09864). "linear": Chen et al. (arXiv:2306.15595).
    "llama3": wavelengths beyond original/low are stretched by `factor`, those below
    original/high kept, in between interpolated; Llama 3.1's model card and reference code.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (theta**exponents)
    if scaling is None or scaling.rope_type == "default":
        return inv_freq
    stretched = inv_freq / scaling.factor
    if scaling.rope_type == "linear":
        return stretched
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    smooth = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * stretched + smooth * inv_freq


def rope_table(inv_freq: Tensor, max_positions: int, device: torch.device) -> Tensor:
    """[max_positions, head_dim] f32 on `device`: cosines in the first half, sines in the second."""
    inv_freq = inv_freq.to(device)
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
