"""The digest of weights on a GPU: the CPU's value."""

import pytest
import torch

from worker.start.digest import GPU_BLOCK, tensor_sum
from worker.weights.shard import Shard

pytestmark = pytest.mark.gpu(1)


def whole(tensor: torch.Tensor) -> Shard:
    return Shard(tensor, tuple(tensor.shape), tuple(slice(0, n) for n in tensor.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (4099, 4097), (GPU_BLOCK // 4096 + 3, 4096)])
def test_the_digest_is_the_cpu_s(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert int(tensor_sum(whole(tensor.cuda()))) == int(tensor_sum(whole(tensor)))
