"""Whatever the chart mentions exists; and this is noticed wherever it does not."""

from __future__ import annotations

import pytest

from tests.helm import metrics
from tests.helm.charts import VALUES, documents
from tests.helm.integrity import Render, changed

MUTATIONS = {
    "Service": ("default", "Service demo-kvlane-head", "name: demo-kvlane-head", "name: demo-head"),
    "port": ("default", "StatefulSet demo-kvlane-head", "name: gcs", "name: ray"),
    "port of a probe": ("default", "Deployment demo-kvlane-serve", "port: http", "port: api"),
    "path of a probe": ("default", "Deployment demo-kvlane-serve", "path: /ready", "path: /rdy"),
    "label": (
        "default", "Deployment demo-kvlane-serve",
        "app.kubernetes.io/component: serve", "app.kubernetes.io/component: router",
    ),
    "Secret": ("default", "Secret demo-kvlane-ray", "name: demo-kvlane-ray", "name: demo-ray"),
    "key of a Secret": ("gpu-rdma", "Secret api-keys", "keys:", "key:"),
    "ConfigMap": ("default", "ConfigMap demo-kvlane", "config.yaml:", "kvlane.yaml:"),
    "claim": ("pvc", "PersistentVolumeClaim models", "name: models", "name: weights"),
    "metric in a KEDA query": (
        "autoscaling", "ScaledObject demo-kvlane-decode",
        "kvlane_requests_waiting", "kvlane_num_requests_waiting",
    ),
    "metric of an autoscaler": (
        "autoscaling", "HorizontalPodAutoscaler demo-kvlane-prefill",
        "kvlane_requests_waiting", "kvlane_queue_length",
    ),
    "metric in an alert": (
        "monitoring", "PrometheusRule demo-kvlane",
        "kvlane_kv_cache_usage_ratio", "kvlane_kv_cache_usage_perc",
    ),
    "label in an alert": ("monitoring", "PrometheusRule demo-kvlane", "outcome!~", "finish!~"),
    "job in a query": ("autoscaling", "PodMonitor demo-kvlane-workers", "-workers", "-pods"),
    "port of a ServiceMonitor": (
        "monitoring", "ServiceMonitor demo-kvlane", "port: http", "port: web",
    ),
    "labels of a ServiceMonitor": (
        "monitoring", "Service demo-kvlane",
        "labels:\n    app.kubernetes.io/component: serve",
        "labels:\n    app.kubernetes.io/component: api",
    ),
    "port of a PodMonitor": (
        "monitoring", "PodMonitor demo-kvlane-workers", "port: metrics", "port: m",
    ),
    "path of the configuration": (
        "default", "Deployment demo-kvlane-serve", "decode.num_cpus", "decode.cpus",
    ),
    "value of the configuration": (
        "default", "ConfigMap demo-kvlane",
        "worker_metrics_port: 9400", "worker_metrics_port: 9401",
    ),
    "option": ("default", "Deployment demo-kvlane-serve", "--prefill=", "--num-prefill="),
    "Ray's resource": ("kuberay", "RayCluster demo-kvlane", '"decode-', '"dec-'),
    "backend of an Ingress": ("edge", "Ingress llm", "name: http", "name: https"),
    "backend of an HTTPRoute": ("edge", "HTTPRoute llm", "port: 80", "port: 8000"),
    "URL of the test": ("edge", "Pod llm-test", "http://llm:80", "http://llm:8000"),
}  # fmt: skip


@pytest.mark.parametrize("name", [path.stem for path in VALUES])
def test_whatever_is_mentioned_is_defined(name: str) -> None:
    assert Render(documents(name)).breaches() == []


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_name_that_changes_in_one_place_is_noticed(mutation: str) -> None:
    name, which, old, new = MUTATIONS[mutation]
    found = Render(changed(documents(name), which, old, new)).breaches()
    assert found, f"{which}: {old} became {new}, and nothing was said"


@pytest.mark.parametrize("name", ["kvlane_requests_waiting", "kvlane_requests_total"])
def test_a_metric_that_the_product_gives_up_is_noticed(name: str) -> None:
    left = {each: labels for each, labels in metrics.exported().items() if each != name}
    renders = [Render(documents(each), left) for each in ("monitoring", "autoscaling")]
    assert any(name in breach for render in renders for breach in render.breaches())
