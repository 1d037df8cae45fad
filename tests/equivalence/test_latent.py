"""Models with latent attention against `transformers`; their two forms; mutants are red."""

from pathlib import Path

import pytest

from tests.equivalence import test_models as models
from tests.support.latents import LATENT, save_latent

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", LATENT)
def test_logits_and_greedy_ids_equal_transformers(case: str, tmp_path: Path) -> None:
    path = tmp_path / case
    models.assert_same(save_latent(path, case), path, chunks=(64, 5))
