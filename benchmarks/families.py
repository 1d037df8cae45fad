"""Every family that is served against `transformers`, by seeded tiny checkpoints, in float32.

    python -m benchmarks.families                     # all cases
    python -m benchmarks.families gemma2 olmo3        # some
    python -m benchmarks.families --architecture Gemma2ForCausalLM

For each case of the tests (tests/support/dense_families.py, tests/equivalence/test_models.py)
`transformers` makes and saves a model. Its logits are compared with ours for whole prompts, chunks
and decode; then a prefill and a decode worker serve it, twice, the second time with cached
prefixes, and the ids are compared. Exits with 1 if something differs.

A family is added by a row of worker/config/checkpoint/families.py, a case in
tests/support/dense_families.py and this command. What a feature that is left out breaks is
tests/equivalence/test_dense_mutants.py.
"""

import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.output import parser, write
from tests.equivalence import test_dense_laws as laws
from tests.equivalence import test_models as models
from worker.config.checkpoint.families import FAMILIES
from worker.errors import UserError

# What transformers has not, or what has more around a text that is a case; where it is tested.
LATENT = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"
ELSEWHERE = {
    **dict.fromkeys(LATENT, "tests/equivalence/test_latent.py"),
    "GptOssForCausalLM": "tests/equivalence/test_oss.py",
    "MiMoForCausalLM": "tests/equivalence/test_mtp.py",
    "Qwen3_5ForConditionalGeneration": "tests/equivalence/test_mtp.py",
    "Qwen3_5MoeForConditionalGeneration": "tests/equivalence/test_expert_models.py",
}


def architecture_of(case: str) -> str:
    """The architecture that the case's checkpoint has."""
    family, changes = laws.MODELS[case]
    sees_images = family == "Gemma3" and changes.get("tie_word_embeddings")
    return f"{family}For{'ConditionalGeneration' if sees_images else 'CausalLM'}"


def untested() -> list[str]:
    """Architectures that neither a case has nor another test."""
    return sorted(set(FAMILIES) - {*map(architecture_of, laws.MODELS), *ELSEWHERE})


def check(case: str) -> str:
    """Make the case's model, compare logits, and let two workers serve it; what differs."""
    with tempfile.TemporaryDirectory(prefix="kvlane-families-") as directory:
        path = Path(directory) / case
        try:
            model = models.save_random(path, *laws.MODELS[case])
            models.assert_same(model, path, chunks=(64, 5))
            ids = laws.served(path, {"mode": "always"})
        except (UserError, AssertionError) as problem:
            return str(problem) or "logits or ids differ"
        return "" if ids == laws.greedy(model) else "the ids of two workers differ"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("cases", nargs="*", help="by name; default: all")
    made.add_argument("--architecture", help="all cases of it")
    options = made.parse_args(arguments)
    cases = options.cases or sorted(laws.MODELS)
    if unknown := set(cases) - set(laws.MODELS):
        made.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(laws.MODELS)}")
    if options.architecture:
        cases = [case for case in cases if architecture_of(case) == options.architecture]
    torch.set_num_threads(1)
    import_module("transformers").logging.disable_progress_bar()
    found: dict[str, str] = {}
    for case in cases:
        found[case] = check(case)
        print(f"{case:20} {architecture_of(case):34} {found[case] or 'the same'}", flush=True)
    failed = list(filter(None, found.values()))
    print(f"{len(found) - len(failed)} of {len(found)} as transformers computes them")
    if missing := untested():
        print(f"no case has {', '.join(missing)}")
    write(options.json, {"cases": found})
    return int(bool(failed or missing or not found))


if __name__ == "__main__":
    sys.exit(main())
