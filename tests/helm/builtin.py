"""Checks objects against Kubernetes' own schemas; runs in .tools/helm/venv.

Reads {name: [object, …]} as JSON; arguments are versions of Kubernetes. Prints what is wrong.
"""

import json
import sys
from functools import cache

import kubernetes_validate
from kubernetes_validate import utils

CUSTOM = ("ray.io/", "monitoring.coreos.com/", "keda.sh/", "gateway.networking.k8s.io/")

utils.schema_contents = cache(utils.schema_contents)  # else all are parsed anew for each object
wrong, num, seen = [], 0, set()
for name, objects in json.load(sys.stdin).items():
    for each in objects:
        text = json.dumps(each, sort_keys=True)
        if each["apiVersion"].startswith(CUSTOM) or text in seen:
            continue
        seen.add(text)
        for version in sys.argv[1:]:
            num += 1
            try:
                kubernetes_validate.validate(each, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                kind, path = each["kind"], "/".join(map(str, error.path))
                wrong.append(
                    f"{name}, {kind} {each['metadata']['name']}, {version}: {path}: {error.message}"
                )
print(*wrong, f"{num} checks", sep="\n")
sys.exit(bool(wrong))
