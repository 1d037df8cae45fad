"""Products by the project's own kernel, and laws that hold for them."""

from collections.abc import Callable, Sequence

import torch

from tests.gpu.sync import no_sync
from worker.ops.skinny_triton import SkinnyTile, SkinnyWorkspace, skinny_gemm


def noise(
    *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def weights(n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    made = noise(n, k, dtype=torch.float32, seed=seed, device="cuda")
    return made.mul_(k**-0.5).to(dtype)


def computed(
    x: torch.Tensor, w: torch.Tensor, tile: SkinnyTile, *, poison: float = 7e7, pdl: bool = False
) -> torch.Tensor:
    """One product into poisoned memory; nothing beside [m, n] may be written."""
    m, n = len(x), len(w)
    workspace = SkinnyWorkspace.allocate([(tile, n)], x.device)
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


def check_chain(m: int, shapes: Sequence[tuple[int, int]], tiles: Sequence[SkinnyTile]) -> None:
    """Products that share a workspace and two buffers, with torch's kernels between: each reads
    what the kernel before wrote, though it starts before that one ends."""
    ws = [weights(n, k, seed=i) for i, (n, k) in enumerate(shapes)]
    sizes = [(tile, n) for tile, (n, _) in zip(tiles, shapes, strict=True)]
    workspace = SkinnyWorkspace.allocate(sizes, "cuda")
    x, widest = noise(m, shapes[0][1], device="cuda"), max(n for n, _ in shapes)
    buffers = [torch.empty(m, widest, device="cuda").bfloat16() for _ in range(2)]

    def chain(pdl: bool) -> torch.Tensor:
        hidden = x
        for i, (w, tile) in enumerate(zip(ws, tiles, strict=True)):
            out = buffers[i % 2][:, : len(w)]
            skinny_gemm(hidden[:, : w.shape[1]], w, out, workspace, tile, pdl=pdl)
            if i % 3 == 2:
                out.mul_(1.25)
            hidden = out
        return hidden

    expected = chain(False).clone()
    graph = captured(lambda: chain(True))
    last = buffers[(len(ws) - 1) % 2][:, : len(ws[-1])]
    for i in range(50):
        for buffer in buffers:
            buffer.fill_(float("nan"))
        graph.replay()
        assert torch.equal(last, expected), i
    assert not workspace.arrivals.any()


def check_hot_call(m: int, tile: SkinnyTile) -> None:
    x, w = noise(m, 4096, device="cuda"), weights(4096, 4096)
    workspace = SkinnyWorkspace.allocate([(tile, 4096)], "cuda")
    out = torch.empty(m, 4096, device="cuda").bfloat16()
    skinny_gemm(x, w, out, workspace, tile, pdl=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_sync():
        skinny_gemm(x, w, out, workspace, tile, pdl=False)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def check_replays(x: torch.Tensor, w: torch.Tensor, tile: SkinnyTile, times: int) -> None:
    first = computed(x, w, tile)
    workspace, out = SkinnyWorkspace.allocate([(tile, len(w))], "cuda"), torch.empty_like(first)
    graph = captured(lambda: skinny_gemm(x, w, out, workspace, tile, pdl=True))
    other, noisy = torch.cuda.Stream(), torch.empty(1 << 26, device="cuda")
    for i in range(times):
        with torch.cuda.stream(other):
            noisy[: 1 << (12 + i % 15)].mul_(0.5)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first), i
