"""What newcomers ask is never trained, and is judged rightly."""

import random
import re
import subprocess
import sys
from pathlib import Path

from benchmarks import accuracy
from benchmarks.train import sums, words
from benchmarks.train.arithmetic import evaluate
from tests.support.patience import HANG_S

ASKED = {kind: accuracy.newcomers(kind) for kind in ("sums", "json", "tools")}
NUM_DRAWN = 1500
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def wording(text: str) -> str:
    """A question without its numbers, names and things: what is left is how it is put."""
    return " ".join(re.findall(r"\b[a-z]{1,4}\b|[.?,]", re.sub(r"\d+|\b[A-Z]\w+", "", text)))


def test_no_name_and_no_wording_of_newcomers_is_trained() -> None:
    rng = random.Random(2)
    trained = {wording(sums.draw_sum(rng).question) for _ in range(NUM_DRAWN)}
    asked = [wording(item["ask"]) for item in ASKED["sums"]]
    assert len(trained) > NUM_DRAWN // 2
    assert len(set(asked)) == len(asked) == 48
    assert not trained & set(asked)
    names = {*words.NAMES, *(name for name in sums.bank()["names"] + sums.bank()["cities"])}
    for item in (*ASKED["sums"], *ASKED["json"], *ASKED["tools"]):
        assert not names & set(re.findall(r"[A-Z]\w+", item["ask"])), item["ask"]
    read = "import sys, benchmarks.train.data; assert 'benchmarks.accuracy' not in sys.modules"
    subprocess.run([sys.executable, "-c", read], check=True, timeout=HANG_S)
    texts = (file.read_text() for file in Path(sums.__file__).parent.glob("*.py"))
    assert not any('newcomers.toml"' in text for text in texts)


def test_trained_sums_are_worked_rightly() -> None:
    rng = random.Random(3)
    for _ in range(NUM_DRAWN):
        drawn = sums.draw_sum(rng)
        for line in drawn.work:
            steps = STEP.findall(line)
            assert len(steps) == line.count("=") > 0
            for left, op, right, result in steps:
                assert evaluate(int(left), op, int(right)) == int(result), line
        assert int(steps[-1][3]) == drawn.value
        assert not re.search(r"[{}<>\[\]|]|  ", drawn.question + drawn.say), drawn
