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
given = json.load(sys.stdin)
once = {json.dumps(document, sort_keys=True): name for name in given for document in given[name]}
wrong = []
for text, name in once.items():
    document = json.loads(text)
    for version in () if document["apiVersion"].startswith(CUSTOM) else sys.argv[1:]:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = "/".join(map(str, error.path))
            wrong.append(f"{name}, {document['kind']}, {version}: {path}: {error.message}")
print(*wrong, sep="\n")
sys.exit(bool(wrong))
