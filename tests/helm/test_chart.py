"""The chart as two Helms and nine Kubernetes see it."""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm.generate import written
from tests.helm import metrics
from tests.helm.charts import (
    CHART,
    HERE,
    NAMES,
    REPOSITORY,
    Render,
    changed,
    described,
    documents,
    parsed,
    rendered,
    template,
    tool,
)
from tests.support.pairwise import one_in

KUBERNETES = [f"1.{minor}" for minor in range(29, 38)]


@pytest.mark.parametrize("major", [3, 4])
def test_lint_is_strict(major: int) -> None:
    done = tool(f"helm{major}", "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_both_helms_render_the_same(name: str) -> None:
    assert rendered(name, 3) == rendered(name, 4)


def test_the_state_of_ray_is_on_a_volume_or_in_a_redis() -> None:
    for name, is_kept in (("pvc", "RAY_gcs_storage_path"), ("s3", "RAY_REDIS_ADDRESS")):
        (head,) = (each for each in documents(name) if each["kind"] == "StatefulSet")
        (container,) = head["spec"]["template"]["spec"]["containers"]
        assert is_kept in {each["name"] for each in container["env"]}
        has_volume = "gcs" in {each["name"] for each in container["volumeMounts"]}
        assert has_volume == ("volumeClaimTemplates" in head["spec"]) == (name == "pvc")
        asks = '--redis-password="$(cat /etc/kvlane-redis/password)" \\\n'
        assert (asks in container["args"][0]) == (name == "s3")


def check_schemas(objects: dict[str, Any], *versions: str) -> subprocess.CompletedProcess[str]:
    text = json.dumps(objects)
    return tool("venv/bin/python", str(HERE / "schemas.py"), *versions, text=text)


def test_kubernetes_and_operators_take_every_object() -> None:
    done = check_schemas({name: documents(name) for name in NAMES}, *KUBERNETES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_field_that_no_schema_knows_is_noticed() -> None:
    wrong = {
        new: changed(documents(name), which, old, new)
        for name, which, old, new in (
            ("gpu-rdma", "PodDisruptionBudget demo-kvlane-decode", "maxUnava", "maxAva"),
            ("kuberay", "RayCluster demo-kvlane", "containerPort", "containPort"),
            ("monitoring", "ServiceMonitor demo-kvlane", "15s", "15parsecs"),
            ("autoscaling", "ScaledObject demo-kvlane-decode", "minReplicaCount", "minReplicas"),
        )
    }
    done = check_schemas(wrong, "1.34")
    assert done.returncode == 1
    assert all(f"{new}, " in done.stdout for new in wrong)


def test_queries_are_promql(tmp_path: Path) -> None:
    scaled = Render(documents("autoscaling")).kind("ScaledObject")
    queries = [query for document in scaled for query in metrics.of(document)]
    for query, is_right in (*((query, True) for query in queries), ("sum(rate(x[5m])", False)):
        rules = [{"record": "some:name", "expr": query}]
        text = yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]})
        (tmp_path / "rules.yaml").write_text(text)
        done = tool("promtool", "check", "rules", str(tmp_path / "rules.yaml"))
        assert (done.returncode == 0) == is_right, done.stderr


def test_generated_files_are_those_of_today() -> None:
    for path, expected in written().items():
        assert path.read_text() == expected, f"{path}: python -m helm.generate"


NODE = "workers: {layout: node}"
# A dot is a slash in some messages of Helm.
REFUSED = (
    ("prefil: {replicas: 2}", "prefil"),
    ("prefill: {replica: 2}", "prefill.*replica"),
    ("decode: {replicas: 0}", "decode.replicas.*1"),
    ("decode: {gpus: 17}", "decode.gpus.*16"),
    ("image: {tag: latest}", "image.tag"),
    ("config: {decode: {engine: {max_reqs: 3}}}", "config.decode.engine.*max_reqs"),
    ("config: {cluster: {drain_timeout_s: soon}}", "config.cluster.drain_timeout_s.*number"),
    ("config: {prefill: {replicas: 2}}", "config.prefill.replicas.*set prefill.replicas"),
    ("config: {decode: {tp: 2}}", "config.decode.tp.*set decode.gpus"),
    ("config: {cluster: {port: 80}}", "config.cluster.port"),
    ("config: {router: {tls_key_file: /k}}", "config.router.tls_key_file.*set serve.tls"),
    ("{model: {source: hf, hf: {name: a/b}}, config: {model: {path: c}}}", "config.model.path"),
    ("model: {source: hf}", "model.hf.name"),
    ("model: {source: pvc}", "model.pvc.existingClaim"),
    ("tier: {volume: pvc}", "tier.pvc.existingClaim"),
    ("tier: {volume: hostPath}", "tier.hostPath.path"),
    ("{tier: {volume: emptyDir}, config: {kv: {tier: {directory: /a}}}}", "tier.volume.*remove"),
    ("config: {transport: {name: shm}}", "config.transport"),
    ("prefill: {rdma: {enabled: true}}", "prefill.rdma.enabled.*TCP.*kind: rdma"),
    ("config: {cluster: {drain_timeout_s: 600}}", "terminationGracePeriodSeconds"),
    ("decode: {pdb: {enabled: true}}", "decode.pdb.maxUnavailable"),
    ("decode: {autoscaling: {kind: hpa}}", "monitoring.podMonitor"),
    ("monitoring: {prometheusRule: {enabled: true}}", "serviceMonitor"),
    (
        "{monitoring: {serviceMonitor: {enabled: true}}, serve: {apiKeys: {existingSecret: k}}}",
        "serviceMonitor.apiKey.*admin_access: open",
    ),
    ("{cluster: {kind: kuberay}, decode: {autoscaling: {kind: hpa}}}", "decode.autoscaling"),
    ("ingress: {enabled: true}", "ingress.hosts"),
    ("pods: {hostNetwork: true}", "networkPolicy.enabled"),
    ("config: {cluster: {worker_metrics_ports: 2}}", "config.cluster.worker_metrics_ports"),
    ("workers: {node: {gpus: 8}}", "workers.node.gpus.*layout: node"),
    ("workers: {node: {env: [{name: A}]}}", "workers.node.env.*layout: node"),
    (f"{{{NODE}, decode: {{autoscaling: {{kind: hpa}}}}}}", "decode.autoscaling.*layout: role"),
    (f"{{{NODE}, prefill: {{rdma: {{enabled: true}}}}}}", "prefill.rdma.*set workers.node.rdma"),
    (
        f"{{{NODE}, decode: {{tolerations: [{{}}]}}}}",
        "decode.tolerations.*workers.node.tolerations",
    ),
    (f"{{{NODE}, decode: {{gpus: 2}}}}", "decode.gpus.*one pod"),
    (f"{{{NODE}, decode: {{replicas: 3}}}}", "workers.node.cpus.*4 together.*1 pods have 2"),
    ("workers: {layout: node, node: {pdb: {enabled: true}}}", "workers.node.pdb.maxUnavailable"),
    ("workers: {layout: node, node: {rdma: {enabled: true}}}", "workers.node.rdma.enabled.*TCP"),
    (
        "{workers: {layout: node, node: {replicas: 2}}, config: {transport: {name: shm}}}",
        "config.transport.*one pod for all workers",
    ),
)


@pytest.mark.parametrize("major", one_in(2, [4, 3]))
@pytest.mark.parametrize(("values", "said"), REFUSED)
def test_what_would_not_work_is_refused_with_what_to_do(major: int, values: str, said: str) -> None:
    done = template(major=major, values=values)
    assert done.returncode != 0, f"rendered: {values}"
    assert re.search(said, done.stderr), done.stderr


@pytest.mark.parametrize("graph", ["eager", "{decode: full}"])
def test_the_schema_takes_one_word_for_a_section_as_the_product_does(graph: str) -> None:
    done = template(values=f"config: {{decode: {{engine: {{graph: {graph}}}}}}}")
    assert done.returncode == 0, done.stderr


def pods_of(name: str) -> dict[str, Any]:
    return Render(documents(name)).components()


@pytest.mark.parametrize("name", NAMES)
def test_pods_are_probed_confined_and_of_a_fixed_version(name: str) -> None:
    components = pods_of(name)
    workers = {"node"} if "node" in name else {"prefill", "decode"}
    assert components.keys() - {"test"} == {"head", "serve"} | workers
    for component, pod in components.items():
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert not container["image"].endswith(":latest")
            assert ":" in container["image"]
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"]["drop"] == ["ALL"]
        if name != "host-path":
            assert pod["securityContext"]["runAsNonRoot"]
        if component == "test":
            continue
        (container,) = pod["containers"]
        assert {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} <= container.keys()
        assert all(port["name"] for port in container["ports"])
        assert container["resources"]["limits"]["memory"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm"} <= mounts


def test_gpus_and_rdma_are_in_requests_and_limits() -> None:
    pods = pods_of("gpu-rdma")
    for component, devices in (
        ("prefill", {"nvidia.com/gpu": "1", "rdma/ib": "1"}),
        ("decode", {"nvidia.com/mig-3g.71gb": "1", "rdma/hca_shared": "2"}),
    ):
        (container,) = pods[component]["containers"]
        for kind in ("requests", "limits"):
            assert devices.items() <= container["resources"][kind].items()
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert pods[component]["tolerations"]
        assert pods[component]["topologySpreadConstraints"][0]["labelSelector"]


def test_a_pod_of_several_gpus_holds_all_ranks_of_its_worker() -> None:
    pods = {component: spec["containers"][0] for component, spec in pods_of("kuberay").items()}
    node = pods["decode"]["args"][0]
    assert pods["decode"]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert "--num-cpus=8 --num-gpus=4" in node
    resource = re.search(r"decode-[0-9a-f]{8}", node)
    assert resource
    assert f'{{"{resource[0]}": 4}}' in node
    serve = pods["serve"]["args"][0]
    assert "--set=decode.tp=4 \\\n  --set=decode.num_cpus=2 --set=decode.num_gpus=1" in serve
    assert f'decode.resources={{"{resource[0]}": 1}}' in serve
    assert "--set=prefill.tp=1" in serve


@pytest.mark.parametrize(
    ("values", "volume"),
    [
        ("volume: emptyDir, emptyDir: {sizeLimit: 1Ti}", {"emptyDir": {"sizeLimit": "1Ti"}}),
        ("volume: pvc, pvc: {existingClaim: kv}", {"persistentVolumeClaim": {"claimName": "kv"}}),
        (
            "volume: hostPath, hostPath: {path: /mnt/nvme}",
            {"hostPath": {"path": "/mnt/nvme", "type": "Directory"}},
        ),
    ],
)
@pytest.mark.parametrize("layout", ["role", "node"])
def test_workers_alone_have_the_volume_of_the_tier(
    layout: str, values: str, volume: dict[str, Any]
) -> None:
    """The directory lies below it: a mount's own mode is not the worker's to choose."""
    done = template(values=f"{{workers: {{layout: {layout}}}, tier: {{{values}}}}}")
    assert done.returncode == 0, done.stderr
    pods = Render(parsed(done.stdout)).components()
    have: dict[str, Any] = {}
    for component, pod in pods.items():
        for mount in pod["containers"][0].get("volumeMounts", []):
            if mount["name"] == "tier":
                have[component] = mount["mountPath"]
                assert {"name": "tier", **volume} in pod["volumes"]
    workers = ("prefill", "decode") if layout == "role" else ("node",)
    assert have == dict.fromkeys(workers, "/var/cache/kvlane")
    serve = pods["serve"]["containers"][0]["args"][0]
    assert "--set=kv.tier.directory=/var/cache/kvlane/kv" in serve


@pytest.mark.parametrize("name", NAMES)
def test_a_disruption_budget_is_below_the_replicas(name: str) -> None:
    render = Render(documents(name))
    for budget in render.kind("PodDisruptionBudget"):
        workload = render.named("Deployment", budget["metadata"]["name"])
        assert workload is not None
        replicas = workload["spec"].get("replicas", 2)
        assert budget["spec"]["maxUnavailable"] < replicas


def test_pods_of_a_node_hold_workers_of_both_roles() -> None:
    """Both ask for one resource. The first has 3 of 6 workers, the second perhaps all 4."""
    for name, room, ports in (("node", 16, 3), ("node-rdma", 4, 4)):
        pods = pods_of(name)
        words = pods["node"]["containers"][0]["args"][0]
        ((resource, ranks),) = re.findall(r"--resources='{\"(node-\w+)\": (\d+)}'", words)
        assert int(ranks) == room
        assert len(pods["node"]["containers"][0]["ports"]) == ports + 1
        asked = pods["serve"]["containers"][0]["args"][0]
        for role in ("prefill", "decode"):
            assert f'{role}.resources={{"{resource}": 1}}' in asked
    assert pods["node"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "hostNetwork" not in pods["serve"]


def test_both_kinds_of_cluster_run_the_same_pods() -> None:
    plain, kuberay = pods_of("default"), pods_of("kuberay")
    for component in ("head", "prefill", "decode", "serve"):
        one, other = (pods[component]["containers"][0] for pods in (plain, kuberay))
        assert one["command"] == other["command"]
        assert one["livenessProbe"] == other["livenessProbe"]
        assert {each["name"] for each in one["env"]} == {each["name"] for each in other["env"]}


def test_the_resource_of_a_pool_changes_with_its_pods_only() -> None:
    def resource(*sets: str) -> str:
        done = template(*(f"--set={each}" for each in sets))
        assert done.returncode == 0, done.stderr
        match = re.search(r"--resources='\{\"((?:decode|node)-\w+)\"", done.stdout)
        assert match
        return match[1]

    assert resource() == resource("decode.replicas=3", "config.lease.renew_s=1")
    node = ("workers.layout=node", "workers.node.cpus=8")
    assert resource(*node) == resource(*node, "config.lease.renew_s=1")
    assert resource(*node) != resource(*node, "decode.replicas=2"), "another port, so other pods"
    assert resource() != resource("image.tag=0.1.1")
    assert resource() != resource("decode.nodeSelector.gpu=h200")


def test_the_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]
    ray = chart["annotations"]["kvlane/ray-version"]
    assert any(
        f"=={ray}" in dependency
        for dependency in project["dependencies"]
        if dependency.startswith("ray")
    )


def test_every_value_is_described_and_read_by_a_template() -> None:
    paths = set(described())
    files = [path for path in (CHART / "templates").rglob("*") if path.is_file()]
    templates = "".join(path.read_text() for path in files)

    def leaves(node: Any, path: str = "") -> Iterator[str]:
        if path in paths or not isinstance(node, dict):
            yield path
        else:
            for name, below in node.items():
                yield from leaves(below, f"{path}.{name}".lstrip("."))

    for path in leaves(yaml.safe_load((CHART / "values.yaml").read_text())):
        name = path.rpartition(".")[2]
        assert path in paths or path.startswith("decode.autoscaling"), f"{path}: no # --"
        assert re.search(rf'[."]{name}\b', templates), f"{path} is read by no template"
