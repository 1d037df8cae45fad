"""Checks objects against the schemas of their kinds; runs in .tools/helm/venv.

Reads {name: [object, …]} as JSON; arguments are versions of Kubernetes. Prints what is wrong. Of
KubeRay and the Gateway API there is no schema: of a RayCluster its pods are checked.
"""

import json
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus
from kubernetes_validate import utils
from pydantic import ValidationError

OPERATORS = {"keda.sh/v1alpha1": keda, "monitoring.coreos.com/v1": prometheus}
NO_SCHEMA = ("ray.io/v1", "gateway.networking.k8s.io/v1")

utils.schema_contents = cache(utils.schema_contents)  # else all are parsed anew for each object


def wrong(document: dict[str, Any]) -> Iterator[str]:
    kind, of = document["kind"], document["apiVersion"]
    if kind == "RayCluster":
        spec = document["spec"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            yield from wrong({"apiVersion": "v1", "kind": "Pod", **group["template"]})
    if of in OPERATORS:
        try:
            getattr(OPERATORS[of], kind).model_validate(document, extra="forbid")
        except ValidationError as error:
            yield f"{kind}: {error}"
    for version in () if of in OPERATORS or of in NO_SCHEMA else sys.argv[1:]:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{kind}, {version}: {'/'.join(map(str, error.path))}: {error.message}"


given = json.load(sys.stdin)
once = {json.dumps(document, sort_keys=True): name for name in given for document in given[name]}
lines = [f"{name}, {each}" for text, name in once.items() for each in wrong(json.loads(text))]
print(*lines, sep="\n")
sys.exit(bool(lines))
