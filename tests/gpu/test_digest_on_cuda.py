"""The digest of weights on a GPU: the CPU's value, and what it costs."""

import time

import pytest
import torch

from worker.start.digest import GPU_BLOCK, part_sums, tensor_sum, weights_digest
from worker.weights.shard import Key, Shard

pytestmark = pytest.mark.gpu(1)


def whole(tensor: torch.Tensor) -> Shard:
    return Shard(tensor, tuple(tensor.shape), tuple(slice(0, n) for n in tensor.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (4099, 4097), (GPU_BLOCK // 4096 + 3, 4096)])
def test_the_digest_is_the_cpu_s(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert int(tensor_sum(whole(tensor.cuda()))) == int(tensor_sum(whole(tensor)))


def test_the_weights_of_eight_billion_parameters_are_read_quickly(record_property) -> None:
    """Prints its rate; what is asserted is that one changed bit among them is found."""
    layer = [torch.randn(4096, 4096, device="cuda").bfloat16() for _ in range(14)]
    shards = {Key(f"{i}.{j}"): whole(layer[j]) for i in range(32) for j in range(14)}
    weights_digest(part_sums({Key("warm"): whole(layer[0])}))
    began = time.perf_counter()
    before = weights_digest(part_sums(shards))
    took_s = time.perf_counter() - began
    gigabytes = sum(each.dest.nbytes for each in shards.values()) / 1e9
    record_property("gigabytes_per_s", gigabytes / took_s)
    print(f"{gigabytes:.1f} GB in {took_s:.3f} s: {gigabytes / took_s:.0f} GB/s")
    layer[13].view(torch.int16).view(-1)[-1] ^= 1
    assert weights_digest(part_sums(shards)) != before
