"""Runs the two commands of deploy/README.md for a laptop, as a new user of a fresh Debian 12 would.

tests/deploy/build laptop             # installs, up to `kvlane serve`; minutes
python -m tests.deploy.newcomer       # as root; serves and asks, in half a minute
"""

import json
import subprocess

from tests.deploy.blocks import README, REPOSITORY, block
from tests.deploy.containers import Container, prepare
from tests.support.namespaces import enter, wait

SERVE, ASK = block("laptop")
INSTALL, _, START = SERVE.rpartition(" && ")


def main() -> None:
    enter("tests.deploy.newcomer")
    prepare("laptop")
    assert SERVE in (REPOSITORY / "README.md").read_text(), f"README.md and {README} differ"
    container = Container(
        "laptop", ["sh", "-c", f"exec {START}"], options=("--network=host",), image="laptop"
    )
    wait("kvlane serves", lambda: "kvlane serves" in container.output, 120, container.ended)
    answer = subprocess.run(["bash", "-c", f"{ASK} --silent"], check=True, capture_output=True)
    text = json.loads(answer.stdout)["choices"][0]["message"]["content"]
    print(text)
    assert text.endswith("#### 70")
    assert container.end(30) == 0, container.output


if __name__ == "__main__":
    main()
