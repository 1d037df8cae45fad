"""What all tests share: the gpu(n) marker."""

from __future__ import annotations

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    import torch

    wanted = marker.args[0]
    if torch.cuda.device_count() < wanted:
        pytest.skip(f"needs {wanted} CUDA devices, found {torch.cuda.device_count()}")
