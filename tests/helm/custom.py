"""Checks custom resources against the schemas of their definitions.

The definitions of KubeRay, prometheus-operator, KEDA and Gateway API are an archive (`DEFINITIONS`)
that is no part of this repository; where it is absent, the tests that need it are skipped.
"""

import tarfile
from functools import cache
from typing import Any

import jsonschema
import yaml

from tests.helm.charts import REPOSITORY, Document, Loader

DEFINITIONS = REPOSITORY.parent / "shared" / "data" / "kubernetes-crds.tgz"
# File of the definition, and the version that the chart uses.
USED = {
    "gw_httproutes": "v1",
    "keda_scaledobjects": "v1alpha1",
    "mon_podmonitors": "v1",
    "mon_prometheusrules": "v1",
    "mon_servicemonitors": "v1",
    "ray_rayclusters": "v1",
}


def kind_of(document: Document) -> str:
    return f"{document['apiVersion']}/{document['kind']}"


@cache
def kinds() -> dict[str, jsonschema.Draft202012Validator]:
    """group/version/Kind -> what an API server applies: unknown fields are refused."""
    validators = {}
    with tarfile.open(DEFINITIONS) as archive:
        for name, used in USED.items():
            file = archive.extractfile(f"./{name}.yaml")
            assert file is not None
            (definition,) = filter(None, yaml.load_all(file, Loader=Loader))
            spec = definition["spec"]
            (version,) = (each for each in spec["versions"] if each["name"] == used)
            schema = version["schema"]["openAPIV3Schema"]
            _close(schema)
            schema["properties"]["metadata"] = {"type": "object"}  # an API server's own
            kind = f"{spec['group']}/{used}/{spec['names']['kind']}"
            validators[kind] = jsonschema.Draft202012Validator(schema)
    return validators


def breaches(objects: list[Document]) -> list[str]:
    return [
        f"{document['kind']} {error.json_path}: {error.message[:200]}"
        for document in objects
        if is_custom(document)
        for error in kinds()[kind_of(document)].iter_errors(document)
    ]


def is_custom(document: Document) -> bool:
    group = document["apiVersion"].rpartition("/")[0]
    return ("." in group and not group.endswith(".k8s.io")) or group.startswith("gateway.")


def _close(schema: Any) -> None:
    """Makes JSON Schema of what Kubernetes writes in its own words, with closed objects."""
    if isinstance(schema, list):
        for item in schema:
            _close(item)
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
    for value in schema.values():
        _close(value)
