"""Products by the project's own kernel."""

from collections.abc import Callable, Sequence

import torch

from worker.ops.skinny_triton import SkinnyTile, SkinnyWorkspace, skinny_gemm


def noise(
    *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def weights(n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    made = noise(n, k, dtype=torch.float32, seed=seed, device="cuda")
    return made.mul_(k**-0.5).to(dtype)


def workspace_of(
    products: Sequence[tuple[SkinnyTile, int]], device: torch.device | str = "cpu"
) -> SkinnyWorkspace:
    """Enough for each (tile, n) of `products`, and no more."""
    floats = max((tile.num_partials(n) for tile, n in products), default=0)
    tiles = max((tile.num_tiles(n) for tile, n in products), default=0)
    return SkinnyWorkspace(
        torch.empty(max(floats, 1), device=device),
        torch.zeros(max(tiles, 1), dtype=torch.int32, device=device),
    )


def computed(
    x: torch.Tensor, w: torch.Tensor, tile: SkinnyTile, *, poison: float = 7e7, pdl: bool = False
) -> torch.Tensor:
    """One product into poisoned memory; nothing beside [m, n] may be written."""
    m, n = len(x), len(w)
    workspace = workspace_of([(tile, n)], x.device)
    workspace.partial.fill_(poison)
    around = torch.full((m + 2, n + 8 - n % 8), 77.0, dtype=x.dtype, device=x.device)
    skinny_gemm(x, w, around[1 : m + 1, :n], workspace, tile, pdl=pdl)
    assert not workspace.arrivals.any()
    out = around[1 : m + 1, :n].clone()
    around[1 : m + 1, :n] = 77.0
    assert (around == 77.0).all()
    return out


def error(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """Relative to the exact product, in the 2-norm."""
    exact = x.double() @ w.double().T
    return float((got.double() - exact).norm() / exact.norm())


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
