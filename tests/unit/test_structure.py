"""Layers, cycles and sizes of the three packages, from their own syntax trees.

Imports inside functions count; `TYPE_CHECKING` blocks do not. A module that stands in no layer
below is a breach too: whoever adds one says where it belongs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("worker", "router", "cluster")
MAY_IMPORT = {
    "worker": {"worker"},
    "router": {"worker", "router"},
    "cluster": {"worker", "router", "cluster"},
}
ONLY_IN = {"ray": "cluster", "torch": "worker"}
ROUTER_SEES = {"api", "config", "errors", "registry", "wire", "lease", "metrics"}

# Layers of worker, lowest first. A module may import its own layer and those above it in this list.
# A name ending in "." is a whole subpackage, except for modules that are listed by themselves.
LAYERS: dict[str, tuple[str, ...]] = {
    "L0": ("api", "config", "errors", "registry", "wire", "lease", "metrics", "plan"),
    "L1": ("kernels.", "batch", "context", "machine", "meter"),
    "L2": ("comm.", "cache.", "attention."),
    "L3": ("layers.", "models."),
    "L4": (
        "graph.", "spec.", "transfer.",
        "staging", "state", "buffers", "sampler", "grammar", "tail", "runner",
    ),
    "L5": ("req", "schedule.", "ranks"),
    "L6": (
        "loop", "peers", "fetch", "inbound", "outbound", "replies", "followers",
        "memory", "engine", "admission",
        "prefill", "decode", "build",
    ),
}  # fmt: skip
TORCH_FREE = ("L0",)

FILE_LINES, KERNEL_FILE_LINES = 400, 600
FUNCTION_LINES, JIT_LINES = 60, 180
CLASS_METHODS = 15


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, packages by their own name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def under(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run, `if TYPE_CHECKING` bodies left out."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for each in child.orelse:
                yield from under(each)
        else:
            yield from under(child)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def imported(module: str, path: Path, tree: ast.Module) -> set[str]:
    """Every dotted name that the module imports, `from a import b` as a and a.b."""
    names: set[str] = set()
    for node in under(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts if path.name == "__init__.py" else parts[:-1]
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, *([base] if base else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _is_import_call(node):
            names.update(a.value for a in node.args[:1] if isinstance(a, ast.Constant))
    return names


def _is_import_call(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__")


@cache
def imports_of(module: str) -> frozenset[str]:
    path = modules()[module]
    return frozenset(imported(module, path, tree_of(path)))


@cache
def edges_of(module: str) -> frozenset[str]:
    """Our own modules that `module` imports."""
    return frozenset(name for name in imports_of(module) if name in modules() and name != module)


def layer_of(module: str) -> int | None:
    """Index of the layer of worker.<module>; the longest entry that fits decides."""
    best: tuple[int, int] | None = None
    for index, entries in enumerate(LAYERS.values()):
        for entry in entries:
            whole = f"{module}.".startswith(entry) if entry.endswith(".") else module == entry
            if whole and (best is None or len(entry) > best[0]):
                best = len(entry), index
    return None if best is None else best[1]


def knots(graph: dict[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}"


def none_of(breaches: list[str]) -> None:
    assert not breaches, "\n" + "\n".join(sorted(breaches))


def test_lines_of_each_package() -> None:
    """CI prints them, so that a change of size is seen."""
    for package in PACKAGES:
        sizes = sorted(
            len(path.read_text().splitlines())
            for module, path in modules().items()
            if module.split(".")[0] == package
        )
        assert sizes
        print(
            f"{package}: {len(sizes)} files, {sum(sizes)} lines, "
            f"median {sizes[len(sizes) // 2]}, longest {sizes[-1]}"
        )


def test_packages_import_what_stands_to_their_left_only() -> None:
    breaches = []
    for module in modules():
        package = module.split(".")[0]
        for name in imports_of(module):
            top = name.split(".")[0]
            if top in PACKAGES and top not in MAY_IMPORT[package]:
                breaches.append(f"{module} imports {name}")
    none_of(breaches)


def test_ray_is_cluster_s_and_torch_is_worker_s() -> None:
    breaches = [
        f"{module} imports {name}"
        for module in modules()
        for name in imports_of(module)
        if ONLY_IN.get(name.split(".")[0], module.split(".")[0]) != module.split(".")[0]
    ]
    none_of(breaches)


def test_tests_and_benchmarks_are_imported_by_nobody() -> None:
    breaches = [
        f"{module} imports {name}"
        for module in modules()
        for name in imports_of(module)
        if name.split(".")[0] in ("tests", "benchmarks", "pytest", "hypothesis")
    ]
    none_of(breaches)


def test_router_sees_seven_modules_of_worker() -> None:
    breaches = []
    for module in modules():
        if module.split(".")[0] != "router":
            continue
        for name in edges_of(module):
            parts = name.split(".")
            if parts[0] == "worker" and len(parts) > 1 and parts[1] not in ROUTER_SEES:
                breaches.append(f"{module} imports {name}")
    none_of(breaches)


def test_every_module_of_worker_stands_in_a_layer() -> None:
    breaches = [
        f"{module} is in no layer of tests/unit/test_structure.py"
        for module in modules()
        if module.startswith("worker.") and layer_of(module.removeprefix("worker.")) is None
    ]
    none_of(breaches)


def test_layers_of_worker_import_downwards() -> None:
    breaches, names = [], list(LAYERS)
    for module in modules():
        if not module.startswith("worker."):
            continue
        upper = layer_of(module.removeprefix("worker."))
        for name in edges_of(module):
            lower = layer_of(name.removeprefix("worker."))
            if name != "worker" and upper is not None and lower is not None and lower > upper:
                breaches.append(f"{module} ({names[upper]}) imports {name} ({names[lower]})")
    none_of(breaches)


def test_no_import_cycle() -> None:
    none_of([" ".join(knot) for knot in knots({module: edges_of(module) for module in modules()})])


def test_the_lowest_layer_is_free_of_torch_even_indirectly() -> None:
    def reaches(module: str, seen: set[str]) -> list[str]:
        seen.add(module)
        if any(name.split(".")[0] == "torch" for name in imports_of(module)):
            return [module]
        for name in edges_of(module) - seen:
            path = reaches(name, seen)
            if path:
                return [module, *path]
        return []

    breaches = []
    for layer in TORCH_FREE:
        for entry in LAYERS[layer]:
            path = reaches(f"worker.{entry}", set())
            if path:
                breaches.append(" -> ".join([*path, "torch"]))
    none_of(breaches)


def test_files_are_short() -> None:
    breaches = []
    for path in modules().values():
        lines = len(path.read_text().splitlines())
        cap = KERNEL_FILE_LINES if "kernels" in path.parts else FILE_LINES
        if lines > cap:
            breaches.append(f"{path.relative_to(ROOT)}: {lines} lines, cap {cap}")
    none_of(breaches)


def test_functions_are_short() -> None:
    breaches = []
    for path in modules().values():
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
    for path in modules().values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                count = sum(
                    isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef) for x in node.body
                )
                if count > CLASS_METHODS:
                    breaches.append(f"{where(path, node)}: {count} methods, cap {CLASS_METHODS}")
    none_of(breaches)


def public(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Definitions of a module or class whose names are for others, methods included."""
    for node in body:
        definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if definition and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


def is_overload(node: ast.AST) -> bool:
    decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
    return any("overload" in each or each.endswith(".setter") for each in decorators)


def test_every_public_thing_says_what_it_is_for() -> None:
    breaches = []
    for path in modules().values():
        tree = tree_of(path)
        if not ast.get_docstring(tree):
            breaches.append(f"{path.relative_to(ROOT)}: the module")
        for node in public(tree.body):
            if not ast.get_docstring(node) and not is_overload(node):
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
    for path in modules().values():
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


def test_layers_are_told_by_the_longest_entry() -> None:
    names = list(LAYERS)
    for module, layer in {
        "api": "L0", "kernels.philox": "L1", "cache": "L2", "cache.book": "L2", "models": "L3",
        "transfer.shm": "L4", "req": "L5", "schedule.rows": "L5", "decode": "L6",
    }.items():  # fmt: skip
        index = layer_of(module)
        assert index is not None
        assert names[index] == layer
    assert layer_of("apix") is None
    assert layer_of("schedulers") is None
