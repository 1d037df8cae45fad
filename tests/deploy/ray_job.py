"""Runs the commands of deploy/README.md for two hosts with Ray, on two hosts of this machine.

    python -m tests.deploy.ray_job        # as root; two minutes on two idle cores
    python -m tests.deploy.ray_job --up   # with the start commands of deploy/ray/cluster.yaml

What is not as it stands there: kvlane is not installed anew, the model is the bundled one, and the
hosts are network namespaces. Prefill runs on one, decode on the other, KV passes over sockets;
the answers are those of the model alone. A second submit changes nothing, one with other settings
is refused, `down` ends all, and a submit after that starts it again.
"""

import json
import os
import re
import sys
from pathlib import Path

import yaml

from tests.deploy.blocks import REPOSITORY, block
from tests.support.namespaces import Host, answers, enter, wait

FIRST, SECOND = "10.79.0.1", "10.79.0.2"
INSTALL, HEAD, NODE, SUBMIT, ASK = block("ray")
AGAIN, STATUS, DOWN = block("ray-more")
URL = f"http://{FIRST}:8000"
NUM_QUESTIONS = "16"


def environment() -> dict[str, str]:
    """Of both hosts: what the first command exports, with these addresses."""
    exported = dict(re.findall(r"(\w+)=(\S+)", INSTALL.partition("export ")[2]))
    assert exported.keys() >= {"FIRST", "SECOND", "RAY_AUTH_TOKEN"}, exported
    return exported | {
        "FIRST": FIRST, "SECOND": SECOND, "HOME": "/run", "TMPDIR": "/run",
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    }  # fmt: skip


def of_cluster_yaml() -> tuple[list[str], list[str]]:
    """The start commands of head and node, as `ray up` runs them over ssh.

    Without the file that it would have put there, by which the head reaches nodes over ssh.
    """
    described = yaml.safe_load((REPOSITORY / "deploy" / "ray" / "cluster.yaml").read_text())
    venv = "mkdir -p ~/kvlane/.venv/bin && touch ~/kvlane/.venv/bin/activate"  # python is on PATH
    autoscaling = " --autoscaling-config=~/ray_bootstrap_config.yaml"
    head, node = described["head_start_ray_commands"], described["worker_start_ray_commands"]
    assert autoscaling in head[-1]
    return (
        [venv, *(command.replace(autoscaling, "") for command in head)],
        [venv, *(f"export RAY_HEAD_IP={FIRST}; {command}" for command in node)],
    )


def bundled(command: str) -> str:
    own = re.sub(r" --model=\S+ --set=model.served_name=\S+", "", command)
    return re.sub(r'"model": "\w+"', '"model": "tiny"', own)


def job(host: Host, command: str) -> str:
    return host.run(bundled(command).replace(" --no-wait", ""), REPOSITORY)


def main() -> None:
    enter("tests.deploy.ray_job")
    hosts = [Host(*each, environment()) for each in (("a", FIRST), ("b", SECOND))]
    starts = of_cluster_yaml() if sys.argv[1:] == ["--up"] else ([HEAD], [NODE])
    for host, commands in zip(hosts, starts, strict=True):
        for command in commands:
            host.run(command, REPOSITORY)
    api = f"ray job list --address=http://{FIRST}:8265"  # it begins to answer after some seconds
    hosts[0].run(f"for i in $(seq 20); do {api} && exit; sleep 1; done; exit 1", REPOSITORY)
    submit(hosts)

    printed = job(hosts[0], AGAIN)
    assert "it runs already, with this configuration" in printed, printed
    refused = job(hosts[0], f"! {AGAIN} --decode=2")
    assert "another value of decode.replicas; end it first: kvlane down" in refused, refused
    assert answers(f"{URL}/ready")
    print("a second submit changes nothing; with --decode=2 it is refused")

    for number in range(2):  # the second finds nothing to end
        printed = job(hosts[0], DOWN)
        expected = ("kvlane is down", "no kvlane runs on the Ray cluster")[number]
        assert expected in printed, printed
    assert not answers(f"{URL}/health")
    print("down, twice: nothing is left")
    submit(hosts)


def submit(hosts: list[Host]) -> None:
    """Submit, ask, and look who did what."""
    hosts[0].run(bundled(SUBMIT), REPOSITORY)
    wait("the router is ready", lambda: answers(f"{URL}/ready"), 180, str)
    *_, answer = (
        hosts[1].run(bundled(ASK), REPOSITORY).strip().splitlines()
    )  # behind curl's progress
    print(json.loads(answer)["choices"][0]["message"])
    rows = job(hosts[0], STATUS)
    places = dict(re.findall(r"^(prefill|decode)-0 .*?(10\.79\.0\.\d)", rows, re.MULTILINE))
    assert places == {"prefill": FIRST, "decode": SECOND}, rows
    print(f"prefill on {FIRST}, decode on {SECOND}")
    # Asks for right answers, for all KV by sockets, and for stages that add up.
    print(hosts[1].run(f"python -m tests.e2e.check {URL} {NUM_QUESTIONS}", REPOSITORY, 300).strip())


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    main()
