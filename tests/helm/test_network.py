"""Who gets through to which port of which pod, by the NetworkPolicies as they are rendered."""

from typing import Any

import pytest

from cluster.diagnose.doors import DOORS, Reach
from tests.helm.charts import NAMES, NAMESPACE, Render, documents, port_names
from tests.helm.test_integrity import containers, matches

UNNAMED = 15_500  # as mooncake, Ray and ZeroMQ choose theirs
# The port that a door has a name by; all others have none, and are for the cluster.
NAMED = {"http": "api", "metrics": "metrics"}
NO_POLICY = ("minimal", "node-rdma")
LABEL = "kubernetes.io/metadata.name"

Peer = tuple[str, dict[str, str]]  # namespace and labels of a pod


def lets_in(render: Render, labels: dict[str, str], pod: dict[str, Any], port: int, peer: Peer):
    """Whether a pod's port is open to a peer: by any policy, or because none means the pod."""
    policies = [
        policy["spec"] for policy in render.kind("NetworkPolicy")
        if matches(policy["spec"]["podSelector"], labels)
    ]  # fmt: skip
    rules = [rule for policy in policies for rule in policy["ingress"]]
    return not policies or any(
        (not rule.get("ports") or port in numbers(rule["ports"], pod))
        and (not rule.get("from") or any(means(each, peer) for each in rule["from"]))
        for rule in rules
    )


def numbers(ports: list[dict[str, Any]], pod: dict[str, Any]) -> set[int]:
    names = port_names(pod)
    return {names.get(port["port"], port["port"]) for port in ports}


def means(source: dict[str, Any], peer: Peer) -> bool:
    namespace, labels = peer
    if "namespaceSelector" in source:
        if not matches(source["namespaceSelector"], {LABEL: namespace, namespace: "true"}):
            return False
    elif namespace != NAMESPACE:
        return False
    return matches(source.get("podSelector", {}), labels)


def of_release(render: Render) -> dict[str, str]:
    """The labels by which its pods know one another."""
    first, *others = (labels for _, labels, _ in render.pods)
    shared = set(first.items()).intersection(*(each.items() for each in others))
    return dict(shared)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_POLICY])
def test_strangers_reach_the_api_alone_and_monitoring_the_metrics(name: str) -> None:
    render = Render(documents(name))
    assert {DOORS[kind].reach for kind in NAMED.values()} == {Reach.CLIENTS, Reach.MONITORING}
    own = of_release(render)
    other = own | {"app.kubernetes.io/instance": "other"}
    strangers = [(NAMESPACE, other), (NAMESPACE, {}), ("apps", {}), ("apps", own)]
    scraped = bool(list(render.kind("PodMonitor")))
    for component, labels, pod in (
        (each["app.kubernetes.io/component"], each, spec) for _, each, spec in render.pods
    ):
        for port, port_name in {
            **{number: name for name, number in port_names(pod).items()}, UNNAMED: "",
        }.items():  # fmt: skip
            assert lets_in(render, labels, pod, port, (NAMESPACE, own))
            from_monitoring = lets_in(render, labels, pod, port, ("monitoring", {}))
            if DOORS[NAMED.get(port_name, "wire")].reach is Reach.CLIENTS:
                assert component == "serve"
                assert lets_in(render, labels, pod, port, ("apps", {}))
                continue
            is_metrics = port_name.startswith("metrics")
            assert from_monitoring == (is_metrics and scraped)
            through = [peer for peer in strangers if lets_in(render, labels, pod, port, peer)]
            # Values that name no namespace open metrics, and nothing else, to all.
            assert not through or (is_metrics and name != "monitoring"), component


def test_the_api_is_for_whom_values_say() -> None:
    render = Render(documents("s3"))
    ((_, labels, pod),) = (
        each for each in render.pods if each[1]["app.kubernetes.io/component"] == "serve"
    )
    port = port_names(pod)["http"]
    assert lets_in(render, labels, pod, port, ("apps", {}))
    assert not lets_in(render, labels, pod, port, (NAMESPACE, {}))


@pytest.mark.parametrize("name", NAMES)
def test_secrets_are_files(name: str) -> None:
    """But for those of the programs that download a model, which end before kvlane starts."""
    for owner, _, spec in Render(documents(name)).pods:
        for container in containers(spec):
            given = [each for each in container.get("env", []) if "secretKeyRef" in str(each)]
            named = {each["name"] for each in given}
            assert not named or container["name"] == "download", f"{owner}: {named}"
    texts = [str(spec["containers"][0]) for _, _, spec in Render(documents("edge")).pods]
    assert sum("/etc/kvlane-keys" in text for text in texts) == 2, "serve and the test"
    assert sum("/etc/kvlane-tls" in text for text in texts) == 1
