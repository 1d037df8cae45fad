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
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.output import parser, write
from tests.equivalence import test_dense_laws as laws
from tests.equivalence import test_models as models
from tests.support.engines import running
from tests.support.expert_families import EXPERTS
from tests.support.laws import ended
from worker.config.checkpoint.families import FAMILIES
from worker.errors import UserError

CASES = models.CASES | EXPERTS
# What transformers has not, or what has more around a text that is a case; where it is tested.
ELSEWHERE = {
    "MiMoForCausalLM": "tests/equivalence/test_mtp.py",
    "Qwen3_5ForConditionalGeneration": "tests/equivalence/test_mtp.py",
    "Qwen3_5MoeForConditionalGeneration": "tests/equivalence/test_expert_models.py",
}


class Found(NamedTuple):
    """What one case showed."""

    case: str
    architecture: str
    error: float  # the largest difference of logits
    ids: bool  # are the greedy ids equal?
    served: bool  # are those of two workers?
    seconds: float
    problem: str = ""  # why it could not be run

    @property
    def passed(self) -> bool:
        """Whether it is served as `transformers` computes it."""
        return not self.problem and self.error < models.BOUND and self.ids and self.served


def architecture_of(case: str) -> str:
    """The architecture that the case's checkpoint has."""
    family, changes = CASES[case]
    sees_images = family == "Gemma3" and changes.get("tie_word_embeddings")
    return f"{family}For{'ConditionalGeneration' if sees_images else 'CausalLM'}"


def untested() -> list[str]:
    """Architectures that neither a case has nor another test."""
    return sorted(set(FAMILIES) - {*map(architecture_of, CASES), *ELSEWHERE})


def check(case: str) -> Found:
    """Make the case's model, compare logits, and let two workers serve it."""
    began, architecture = time.monotonic(), architecture_of(case)
    torch.set_num_threads(1)
    import_module("transformers").logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="kvlane-families-") as directory:
        path = Path(directory) / case
        try:
            model = models.save_random(path, *CASES[case])
            rows = list(models.compared(model, path, chunks=(64, 5)))
            served = _served(path, model, models.SHORT.get(case))
        except (UserError, AssertionError) as problem:
            seconds = time.monotonic() - began
            return Found(case, architecture, 0.0, False, False, seconds, str(problem) or "failed")
    error, same = max(row[0] for row in rows), all(row[1] for row in rows)
    return Found(case, architecture, error, same, served, time.monotonic() - began)


def _served(path: Path, model: torch.nn.Module, max_len: int | None) -> bool:
    sections, shape = laws.sections(path, "always"), models.read_model_shape(path)
    scaling = shape.served(max_len or "auto").rope_scaling
    # transformers turns a short text by other frequencies than we do, which serve long ones.
    is_long = scaling is not None and scaling.rope_type == "longrope" and scaling.is_long
    wanted = laws.greedy(model, more=32 if is_long else 0)
    if max_len is not None:
        sections["model"]["max_model_len"] = max_len
    longest = shape.max_position_embeddings - laws.NUM_TOKENS
    prompts = [prompt for prompt in laws.prompts() if len(prompt) <= longest]
    with running(sections, num_prefill=1) as cluster:
        for _ in range(2):
            answers = cluster.client.generate(prompts, laws.GREEDY)
            if [answer.tokens for answer in ended(answers)] != wanted[: len(prompts)]:
                return False
    return True


def checked(cases: Iterable[str], show: Callable[[str], object] = print) -> Iterator[Found]:
    """Check one case after the other, with a line for each."""
    show(f"{'case':20} {'architecture':34} {'logits':>8}  ids  served  seconds")
    for case in cases:
        found = check(case)
        same, served = ("yes" if each else "NO" for each in (found.ids, found.served))
        shown = f"{found.error:8.0e}  {same:3}  {served:6}  {found.seconds:7.1f}"
        show(f"{case:20} {found.architecture:34} {found.problem or shown}")
        yield found


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("cases", nargs="*", help="by name; default: all")
    made.add_argument("--architecture", help="all cases of it")
    options = made.parse_args(arguments)
    cases = options.cases or sorted(CASES)
    if unknown := set(cases) - set(CASES):
        made.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.architecture:
        cases = [case for case in cases if architecture_of(case) == options.architecture]
    found = list(checked(cases))
    failed = [each.case for each in found if not each.passed]
    print(f"{len(found) - len(failed)} of {len(found)} as transformers computes them")
    if missing := untested():
        print(f"no case has {', '.join(missing)}")
    write(options.json, {"cases": [each._asdict() for each in found]})
    return int(bool(failed or missing or not found))


if __name__ == "__main__":
    sys.exit(main())
