"""ByLengthAttention where there is no GPU."""

from collections.abc import Mapping
from typing import ClassVar

from worker.attention.backends import ATTENTION
from worker.attention.by_length import ByLengthAttention


class ByLengthDouble(ByLengthAttention):
    """The reference for a few rows, FlashInfer's double beyond."""

    SHORT = "reference"
    SHORT_ROWS = 10
    TABLE: ClassVar[Mapping[str, str]] = {
        **ATTENTION,
        "flashinfer": "tests.support.flashinfer_double:FlashInferDouble",
    }
