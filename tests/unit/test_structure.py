"""Rooms, layers, circles and sizes of the three packages; `tests.support.structure` reads them.

A module that stands in no room below is a breach too: whoever adds one says where it belongs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.structure import (
    PACKAGES,
    REPOSITORY,
    Tree,
    imported,
    knots,
    num_floors,
    room_of,
    tree_of,
)

MAY_IMPORT = {
    "worker": {"worker"},
    "router": {"worker", "router"},
    "cluster": {"worker", "router", "cluster"},
}
ONLY_IN = {"ray": "cluster", "torch": "worker"}
# Modules of worker by room; the router's are free of torch, whatever else the room holds.
ROUTER_SEES = {"contract", "observe"}
# What a worker is told and answers; the worker itself; of other rooms some modules.
CLUSTER_SEES = {
    *("contract", "observe", "worker", "rank"),
    *("worker.start.check", "worker.peers.rendezvous"),
    *("worker.transfer.host", "worker.transfer.mooncake_libraries"),
}
# Of cluster, lowest first; a folder imports from those before it.
CLUSTER_FLOORS = (
    *("search_path", "config", "logs", "resolve", "download", "tables"),
    *("diagnose", "sites", "control", "serve", "clients"),
    *("cli", "__main__"),
)

# Rooms of worker, lowest first. A room imports from those before it in this list.
ROOMS = [
    *("contract", "observe", "cache", "forward", "ops", "peers", "attention", "recurrent", "step"),
    *("model", "draw", "drafts", "schedule", "transfer", "run", "start"),
    *("loop", "prefill", "decode", "rank", "worker"),
]
MAX_ROOMS, MAX_ARROWS = 21, 90
ROOT_FILES = 12  # of worker, __init__ among them

FILE_LINES, KERNEL_FILE_LINES = 400, 600
FUNCTION_LINES, JIT_LINES = 60, 180
CLASS_METHODS = 15


@cache
def tree() -> Tree:
    """What this checkout holds."""
    return Tree()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef))


def where(path: Path, node: ast.AST) -> str:
    return (
        f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}"
    )


def none_of(breaches: list[str]) -> None:
    assert not breaches, "\n" + "\n".join(sorted(breaches))


def test_packages_import_what_stands_to_their_left_only() -> None:
    breaches = []
    for module, names in tree().imports.items():
        package = module.split(".")[0]
        for name in names:
            top = name.split(".")[0]
            if top in PACKAGES and top not in MAY_IMPORT[package]:
                breaches.append(f"{module} imports {name}")
    none_of(breaches)


def test_ray_is_cluster_s_and_torch_is_worker_s() -> None:
    breaches = [
        f"{module} imports {name}"
        for module, names in tree().imports.items()
        for name in names
        if ONLY_IN.get(name.split(".")[0], module.split(".")[0]) != module.split(".")[0]
    ]
    none_of(breaches)


def test_opentelemetry_is_imported_where_tracing_is_on_only() -> None:
    """It is an optional package, and its import takes a quarter of a second."""
    behind = {"worker.observe.spans"}
    breaches = [
        f"{module} imports {name}"
        for module, names in tree().imports.items()
        for name in names
        if (name.split(".")[0] == "opentelemetry" and module not in behind)
        or (name in behind and module not in {"worker.observe.tracing", *behind})
    ]
    none_of(breaches)


def test_tests_and_benchmarks_are_imported_by_nobody() -> None:
    breaches = [
        f"{module} imports {name}"
        for module, names in tree().imports.items()
        for name in names
        if name.split(".")[0] in ("tests", "benchmarks", "pytest", "hypothesis")
    ]
    none_of(breaches)


def test_router_sees_the_contract_and_what_is_observed() -> None:
    breaches = [
        f"{module} imports {name}"
        for module, names in tree().edges.items()
        if module.split(".")[0] == "router"
        for name in names
        if (room := room_of(name)) is not None and room not in ROUTER_SEES
    ]
    none_of(breaches)


def test_cluster_sees_what_a_start_needs_of_worker() -> None:
    breaches = [
        f"{module} imports {name}"
        for module, names in tree().edges.items()
        if module.split(".")[0] == "cluster"
        for name in names
        if (room := room_of(name)) is not None and not {room, name} & CLUSTER_SEES
    ]
    none_of(breaches)


def test_folders_of_cluster_import_one_way() -> None:
    def floor(module: str) -> int:
        return CLUSTER_FLOORS.index(module.split(".")[1])

    breaches = [
        f"{module} imports {name}"
        for module, names in tree().edges.items()
        for name in names
        if module.startswith("cluster.") and name.startswith("cluster.")
        if floor(name) > floor(module)
    ]
    none_of(breaches)


def test_every_module_of_worker_stands_in_a_room() -> None:
    rooms = tree().rooms()
    none_of([f"{room} is not in ROOMS" for room in rooms if room not in ROOMS])


def test_worker_has_few_rooms_and_arrows() -> None:
    rooms = tree().rooms()
    assert len(rooms) <= MAX_ROOMS
    assert sum(map(len, rooms.values())) <= MAX_ARROWS


def test_the_root_of_worker_is_small() -> None:
    files = sorted(path.name for path in (REPOSITORY / "worker").glob("*.py"))
    assert len(files) <= ROOT_FILES, files


def test_rooms_of_worker_import_from_rooms_below() -> None:
    breaches = [
        f"{module} imports {name}"
        for module, names in tree().edges.items()
        for name in names
        if (upper := room_of(module)) is not None
        and (lower := room_of(name)) is not None
        and upper != lower
        and ROOMS.index(lower) > ROOMS.index(upper)
    ]
    none_of(breaches)


@pytest.mark.parametrize("for_types", [False, True])
def test_no_import_cycle(for_types: bool) -> None:
    none_of([" ".join(knot) for knot in knots(Tree(for_types=for_types).edges)])


def test_what_the_router_imports_is_free_of_torch_even_indirectly() -> None:
    imports, edges = tree().imports, tree().edges

    def reaches(module: str, seen: set[str]) -> list[str]:
        seen.add(module)
        if any(name.split(".")[0] == "torch" for name in imports[module]):
            return [module]
        for name in edges[module] - seen:
            path = reaches(name, seen)
            if path:
                return [module, *path]
        return []

    lowest = [
        module
        for module in imports
        if room_of(module) == "contract" or module.split(".")[0] == "router"
    ]
    paths = [reaches(module, set()) for module in lowest]
    none_of([" -> ".join([*path, "torch"]) for path in paths if path])


def test_files_are_short() -> None:
    breaches = []
    for path in tree().modules.values():
        lines = len(path.read_text().splitlines())
        cap = KERNEL_FILE_LINES if path.stem.endswith("_triton") else FILE_LINES
        if lines > cap:
            breaches.append(f"{path.relative_to(REPOSITORY)}: {lines} lines, cap {cap}")
    none_of(breaches)


def test_functions_are_short() -> None:
    breaches = []
    for path in tree().modules.values():
        for node in functions(tree_of(path)):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines = (node.end_lineno or first) - first + 1
            jit = any("jit" in ast.unparse(each) for each in node.decorator_list)
            cap = JIT_LINES if jit else FUNCTION_LINES
            if lines > cap:
                breaches.append(f"{where(path, node)}: {lines} lines, cap {cap}")
    none_of(breaches)


def test_classes_have_few_methods() -> None:
    breaches = []
    for path in tree().modules.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                count = sum(
                    isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef) for x in node.body
                )
                if count > CLASS_METHODS:
                    breaches.append(f"{where(path, node)}: {count} methods, cap {CLASS_METHODS}")
    none_of(breaches)


def public(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Definitions of a module or class whose names are for others, methods included.

    Not methods that a base class of ours, a Protocol for example, defines and describes.
    """
    for node in body:
        definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if definition and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                known = inherited(node)
                yield from (x for x in public(node.body) if x.name not in known)


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Of all packages, by name."""
    nodes = (node for path in tree().modules.values() for node in ast.walk(tree_of(path)))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def inherited(node: ast.ClassDef) -> set[str]:
    """Names of what the bases of a class define."""
    found: set[str] = set()
    for base in node.bases:
        parent = classes().get(ast.unparse(base).split("[")[0])
        if parent is not None and parent is not node:
            found |= {x.name for x in functions(parent)} | inherited(parent)
    return found


def is_overload(node: ast.AST) -> bool:
    decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
    return any("overload" in each or each.endswith(".setter") for each in decorators)


@cache
def protocol_methods() -> frozenset[str]:
    """Methods that a Protocol describes; implementations need not say it again."""
    protocols = (
        node
        for path in tree().modules.values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and "Protocol" in [ast.unparse(x) for x in node.bases]
    )
    return frozenset(
        method.name
        for node in protocols
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(method)
    )


def test_every_public_thing_says_what_it_is_for() -> None:
    breaches = []
    for path in tree().modules.values():
        module = tree_of(path)
        if not ast.get_docstring(module):
            breaches.append(f"{path.relative_to(REPOSITORY)}: the module")
        for node in public(module.body):
            described = is_overload(node) or node.name.endswith("_triton")  # it has a definition
            described |= bool(node.col_offset) and node.name in protocol_methods()
            if not ast.get_docstring(node) and not described:
                breaches.append(where(path, node))
    none_of(breaches)


def swallows(handler: ast.ExceptHandler) -> bool:
    """A broad handler that neither raises nor ends the process nor looks at the exception."""
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    if not any(name in caught.split() for name in ("Exception", "BaseException")):
        return False
    return all(isinstance(each, ast.Pass | ast.Continue) for each in handler.body)


def test_no_exception_is_caught_bare_or_swallowed() -> None:
    breaches = []
    for path in tree().modules.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or swallows(node)):
                breaches.append(where(path, node))
    none_of(breaches)


SAMPLE = """
from typing import TYPE_CHECKING
import typing
if TYPE_CHECKING:
    import ray
if typing.TYPE_CHECKING:
    import torch
else:
    import worker.api
from . import sibling
from .sub import name
from ..up import other
def f():
    import ray.util
    __import__("worker.decode")
    importlib.import_module("torch.nn")
"""


def test_the_walk_sees_what_runs_and_only_that() -> None:
    names = imported("worker.cache.pages", Path("pages.py"), ast.parse(SAMPLE))
    assert {"worker.api", "ray.util", "worker.decode", "torch.nn"} <= names
    assert {"worker.cache.sibling", "worker.cache.sub.name", "worker.up.other"} <= names
    assert not {"ray", "torch"} & names
    typed = imported("worker.x", Path("x.py"), ast.parse(SAMPLE), for_types=True)
    assert {"ray", "torch"} <= typed
    package = imported("worker.cache", Path("cache/__init__.py"), ast.parse("from . import pages"))
    assert "worker.cache.pages" in package


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "b", "b": "a", "c": "ab"}, [["a", "b"]]),
        ({"a": "bc", "b": "d", "c": "d", "d": "b"}, [["b", "d"]]),
        ({"a": "b", "b": "c", "c": "a", "d": "e", "e": "d"}, [["a", "b", "c"], ["d", "e"]]),
    ],
)
def test_knots_are_found(graph: dict[str, str], expected: list[list[str]]) -> None:
    assert sorted(knots(graph)) == expected


def test_floors_are_the_longest_chain() -> None:
    assert num_floors({"a": "bc", "b": "c", "c": ""}) == 3
    assert num_floors({"a": "", "b": ""}) == 1


def test_rooms_are_folders_of_worker_or_files_at_its_root() -> None:
    named = {
        "worker.plan": "contract",
        "worker.cache.book": "cache",
        "worker.kernels.gemm.x": "kernels",
    }
    assert {name: room_of(name) for name in named} == named
    assert [room_of(name) for name in ("worker", "router.http.app", "cluster")] == [
        None,
        None,
        None,
    ]
