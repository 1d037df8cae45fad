"""Checks custom resources against the schemas of their definitions.

The definitions of KubeRay, prometheus-operator, KEDA and Gateway API lie beside the repository, in
../shared/data; where they are absent, the tests that need them are skipped.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import yaml

from tests.helm.charts import REPOSITORY

DEFINITIONS = REPOSITORY.parent / "shared" / "data" / "kubernetes-crds.tgz"
# File of the definition, and the versions that the chart uses.
USED = {
    "gw_httproutes": "v1",
    "keda_scaledobjects": "v1alpha1",
    "mon_podmonitors": "v1",
    "mon_prometheusrules": "v1",
    "mon_servicemonitors": "v1",
    "ray_rayclusters": "v1",
}


@cache
def kinds() -> dict[str, Any]:
    """group/version/Kind -> schema, as an API server applies it: unknown fields are refused."""
    found: dict[str, Any] = {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with tarfile.open(DEFINITIONS) as archive:
        for name, used in USED.items():
            file = archive.extractfile(f"./{name}.yaml")
            assert file is not None
            (definition,) = filter(None, yaml.load_all(file, Loader=loader))
            spec = definition["spec"]
            [schema] = [
                version["schema"]["openAPIV3Schema"]
                for version in spec["versions"]
                if version["name"] == used
            ]
            _close(schema)
            schema["properties"]["metadata"] = {"type": "object"}  # an API server's own
            found[f"{spec['group']}/{used}/{spec['names']['kind']}"] = schema
    return found


@cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(kinds()[kind])


def breaches(document: dict[str, Any]) -> Iterator[str]:
    """What its definition does not allow."""
    for error in _validator(f"{document['apiVersion']}/{document['kind']}").iter_errors(document):
        yield f"{document['kind']} {'/'.join(map(str, error.path))}: {error.message[:200]}"


def is_custom(document: dict[str, Any]) -> bool:
    """Whether a definition of ours has to know it."""
    group = document["apiVersion"].rpartition("/")[0]
    return ("." in group and not group.endswith(".k8s.io")) or group.startswith("gateway.")


def _close(schema: Any) -> None:
    if isinstance(schema, list):
        for each in schema:
            _close(each)
    if not isinstance(schema, dict):
        return
    kept = schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "properties" in schema and not kept:
        schema.setdefault("additionalProperties", False)
    if schema.pop("nullable", False) is True and "type" in schema:
        schema["type"] = [schema["type"], "null"]
    if schema.pop("x-kubernetes-int-or-string", False) is True:
        schema.pop("type", None)
        schema.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    for each in schema.values():
        _close(each)
