"""Rotary position embedding from a precomputed table, with the scalings of `ROPE_TYPES`."""

import math

import torch
from torch import Tensor

from worker.config.checkpoint.rope_fields import RopeScaling


def rope_inv_freq(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angles per position of rotated pairs: [head_dim / 2] f32 on the CPU.

    Su et al., "RoFormer" (arXiv:2104.09864). "linear": Chen et al. (arXiv:2306.15595).
    "llama3": wavelengths beyond original/low are stretched by `factor`, those below
    original/high kept, in between interpolated; Llama 3.1's model card and reference code.
    "yarn": Peng et al. (arXiv:2309.00071). "longrope": Ding et al. (arXiv:2402.13753).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (theta**exponents)
    if scaling is None or scaling.rope_type in ("default", "dynamic"):
        return inv_freq
    if scaling.rope_type == "longrope":
        factors = scaling.long_factors if scaling.is_long else scaling.short_factors
        return 1.0 / (torch.tensor(factors) * theta**exponents)
    stretched = inv_freq / scaling.factor
    if scaling.rope_type == "linear":
        return stretched
    if scaling.rope_type == "yarn":
        kept = 1 - _yarn_ramp(head_dim, theta, scaling)
        return stretched * (1 - kept) + inv_freq * kept
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    smooth = (scaling.original_max_position_embeddings / wavelength - low) / (high - low)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * stretched + smooth * inv_freq


def _yarn_ramp(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """How far pairs are stretched, from 0 to 1: [head_dim / 2] f32."""

    def pair(rotations: float) -> float:
        """The pair, maybe between two, that turns so often within the original length."""
        length = scaling.original_max_position_embeddings
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # else a division by zero
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)


def rope_table(
    inv_freq: Tensor,
    max_positions: int,
    device: torch.device,
    factor: float = 1.0,
    num_pairs: int | None = None,
) -> Tensor:
    """[max_positions, 2 · num_pairs] f32 on `device`: cosines in the first half, then sines.

    factor: of them all. num_pairs: those beyond inv_freq's are not turned; None: as many as it has.
    """
    inv_freq = inv_freq.to(device)
    positions = torch.arange(max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inv_freq)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    if num_pairs is not None and (more := num_pairs - len(inv_freq)):
        still = positions.new_zeros(max_positions, more)
        cos, sin = torch.cat((cos, still + 1), dim=-1), torch.cat((sin, still), dim=-1)
    return torch.cat((cos, sin), dim=-1)
