"""Checks custom resources against the schemas of their definitions, in crds.json.xz.

That file holds the openAPIV3Schema of six kinds, without descriptions and CEL rules, from KubeRay
(2026-08-19), prometheus-operator (2026-08-08), KEDA (2026-08-20) and Gateway API; all of them are
under the Apache License 2.0. Keys are "group/version/Kind".
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

SCHEMAS = Path(__file__).with_name("crds.json.xz")


@cache
def kinds() -> dict[str, Any]:
    """Kind -> schema, as an API server applies it: unknown fields are refused."""
    with lzma.open(SCHEMAS) as file:
        found = json.load(file)
    for schema in found.values():
        _close(schema)
        schema["properties"]["metadata"] = {"type": "object"}  # an API server's own
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
