"""Rooms, wings, circles and sizes of the three packages; `tests.support.structure` reads them.

A module that stands in no room below is a breach too: whoever adds one says where it belongs.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias, TypeVar

import pytest

from tests.support.structure import (
    PACKAGES,
    REPOSITORY,
    Tree,
    figures,
    imported,
    knots,
    nodes_of,
    room_of,
    walk,
)

MAY_IMPORT = {
    "worker": {"worker"},
    "router": {"worker", "router"},
    "cluster": {"worker", "router", "cluster"},
}
ONLY_IN = {"ray": "cluster", "torch": "worker"} | dict.fromkeys(
    ("tests", "benchmarks", "pytest", "hypothesis"), "none"
)
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
    *("search_path", "config", "flags", "logs", "resolve", "download", "tables"),
    *("diagnose", "sites", "control", "serve", "clients"),
    *("cli", "__main__"),
)

# Of the router: a wing imports from those before it, all import from the root's modules.
WINGS = ("text", "observe", "dispatch", "openai", "adapters", "show", "http")
ROUTER_ROOT = {"__init__.py", "config.py", "errors.py"}
# Rooms of worker, lowest first. A room imports from those before it in this list.
ROOMS = [
    *("contract", "observe", "cache", "forward", "ops", "peers", "attention", "weights", "step"),
    *("model", "draw", "drafts", "schedule", "transfer", "run", "start"),
    *("loop", "prefill", "decode", "rank", "worker"),
]
ROOT_FILES = 13  # of worker, __init__ among them

# What grows unseen if nothing caps it; `tests.support.structure` prints the figures.
MAX = {
    "worker": 39_580,
    "router": 16_850,
    "cluster": 7_650,
    "product": 64_080,
    "tests": 70_900,
    "benchmarks": 10_170,
    "tests / product": 1.11,
    "wide functions": 12,
    "each": 224,
    "rooms": 21,
    "arrows": 91,
    "files of a decode step": 24,
    "lines of a decode step": 4_210,
}
RAISE = (
    "the caps are what stands by the last ADR that raised them; raise one by an ADR with the count"
)

FILE_LINES, KERNEL_FILE_LINES = 400, 600
FUNCTION_LINES, JIT_LINES = 60, 180
CLASS_METHODS = 15
SHAPE = re.compile(r"\[[\w .+*/·,()-]+\]")  # as [num_reqs + 1, head_dim]
REFERS = re.compile(r"\b[Ss]ee [`\w]|^As [`\w]|\bbroadcast shape")


@cache
def tree() -> Tree:
    """What this checkout holds."""
    return Tree()


FUNCTIONS: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
T = TypeVar("T", bound=ast.AST)


@cache
def figures_of_a_step() -> dict[str, int]:
    """What has a cap of a decode step, measured as it runs."""
    from tests.support.decode_step import files_of_a_step  # with torch, which nothing else here has

    step = files_of_a_step()
    return {"files of a decode step": len(step), "lines of a decode step": sum(step.values())}


@cache
def figures_of_the_tree() -> dict[str, float]:
    return figures(tree())


def functions() -> tuple[tuple[Path, FUNCTIONS], ...]:
    return nodes(ast.FunctionDef) + nodes(ast.AsyncFunctionDef)


@pytest.mark.parametrize("name", MAX)
def test_what_is_read_stays_small(name: str) -> None:
    measured = figures_of_a_step() if "decode step" in name else figures_of_the_tree()
    assert measured[name] <= MAX[name], RAISE


@cache
def nodes(kind: type[T]) -> tuple[tuple[Path, T], ...]:
    """File and node of the nodes of a kind, of all modules."""
    return tuple(
        (path, node)
        for path in tree().modules.values()
        for node, _ in nodes_of(path)
        if isinstance(node, kind)
    )


def where(path: Path, node: ast.AST) -> str:
    return (
        f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}"
    )


def none_of(breaches: list[str]) -> None:
    assert not breaches, "\n" + "\n".join(sorted(breaches))


def test_no_process_imports_dynamo_before_it_compiles() -> None:
    """A second of each start, which these import: functions may."""
    slow = re.compile(
        r"(from|import) torch\.(_dynamo|_inductor|nn\.attention|distributed\.tensor)\b"
    )
    tops = [
        f"{where(path, node)}: {ast.unparse(node)}"
        for path in tree().modules.values()
        for node in nodes_of(path)[0][0].body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    none_of([each for each in tops if slow.search(each)])


def package_of(module: str) -> str:
    return module.partition(".")[0]


def forbidden(
    names: Mapping[str, Iterable[str]], is_breach: Callable[[str, str], bool]
) -> list[str]:
    """The imports (module, name) that are breaches."""
    return [
        f"{a} imports {b}" for a, imported in names.items() for b in imported if is_breach(a, b)
    ]


def above(order: Sequence[str], place: Callable[[str], str | None]) -> list[str]:
    """Imports of what stands later in `order`; modules without a place are not looked at."""

    def is_breach(module: str, name: str) -> bool:
        upper, lower = place(module), place(name)
        return None not in (upper, lower) and order.index(lower) > order.index(upper)

    return forbidden(tree().edges, is_breach)


def wing_of(module: str) -> str | None:
    """The wing of a module of the router; None: it stands at the root, or elsewhere."""
    package, _, rest = module.partition(".")
    wing = rest.partition(".")[0]
    return wing if package == "router" and wing in WINGS else None


def test_packages_import_what_stands_to_their_left_only() -> None:
    none_of(
        forbidden(
            tree().imports,
            lambda module, name: package_of(name) in set(PACKAGES) - MAY_IMPORT[package_of(module)],
        )
    )


def test_some_packages_are_imported_in_one_place_or_in_none() -> None:
    """Ray is cluster's and torch worker's; what tests and measures is imported by nobody."""

    def is_breach(module: str, name: str) -> bool:
        own = package_of(module)
        return ONLY_IN.get(package_of(name), own) != own

    none_of(forbidden(tree().imports, is_breach))


def test_opentelemetry_is_imported_where_tracing_is_on_only() -> None:
    """It is an optional package, and its import takes a quarter of a second."""
    behind = {"worker.observe.spans"}

    def is_breach(module: str, name: str) -> bool:
        if package_of(name) == "opentelemetry":
            return module not in behind
        return name in behind and module not in {"worker.observe.tracing", *behind}

    none_of(forbidden(tree().imports, is_breach))


@pytest.mark.parametrize(("package", "seen"), [("router", ROUTER_SEES), ("cluster", CLUSTER_SEES)])
def test_other_packages_see_some_rooms_of_worker_alone(package, seen: set[str]) -> None:
    def is_breach(module: str, name: str) -> bool:
        if package_of(module) != package or (room := room_of(name)) is None:
            return False
        return not {room, name} & seen

    none_of(forbidden(tree().edges, is_breach))


def test_rooms_floors_and_wings_import_from_those_below() -> None:
    def floor(module: str) -> str | None:
        return module.split(".")[1] if module.startswith("cluster.") else None

    none_of(above(ROOMS, room_of) + above(CLUSTER_FLOORS, floor) + above(WINGS, wing_of))


def test_every_module_of_worker_stands_in_a_room_and_of_the_router_in_a_wing() -> None:
    none_of([f"{room} is not in ROOMS" for room in tree().rooms() if room not in ROOMS])
    router = REPOSITORY / "router"
    assert {path.name for path in router.glob("*.py")} == ROUTER_ROOT
    assert {path.parent.name for path in router.glob("*/__init__.py")} == set(WINGS)


def test_the_root_of_the_router_imports_from_no_wing() -> None:
    none_of(
        forbidden(
            tree().edges,
            lambda module, name: (
                package_of(module) == "router" and not wing_of(module) and wing_of(name) is not None
            ),
        )
    )


def test_worker_has_few_files_at_its_root() -> None:
    files = sorted(path.name for path in (REPOSITORY / "worker").glob("*.py"))
    assert len(files) <= ROOT_FILES, files


@pytest.mark.parametrize("for_types", [False, True])
def test_no_import_cycle(for_types: bool) -> None:
    none_of([" ".join(knot) for knot in knots(Tree(for_types=for_types).edges)])


def test_what_the_router_imports_is_free_of_torch_even_indirectly() -> None:
    imports, edges = tree().imports, tree().edges

    def reaches(module: str, seen: set[str]) -> list[str]:
        seen.add(module)
        if any(package_of(name) == "torch" for name in imports[module]):
            return [module, "torch"]
        paths = (reaches(name, seen) for name in edges[module] - seen if name not in seen)
        path = next(filter(None, paths), [])
        return path and [module, *path]

    lowest = [m for m in imports if room_of(m) == "contract" or package_of(m) == "router"]
    none_of([" -> ".join(path) for module in lowest if (path := reaches(module, set()))])


@pytest.mark.parametrize("kind", ["file", "function", "class"])
def test_files_functions_and_classes_are_short(kind: str) -> None:
    none_of([f"{place}: {size}, cap {cap}" for place, size, cap in sizes(kind) if size > cap])


def sizes(kind: str) -> Iterator[tuple[str, int, int]]:
    """(place, lines or methods, how many there may be)."""
    if kind == "file":
        for path in tree().modules.values():
            cap = KERNEL_FILE_LINES if path.stem.endswith("_triton") else FILE_LINES
            yield str(path.relative_to(REPOSITORY)), len(path.read_text().splitlines()), cap
    elif kind == "function":
        for path, node in functions():
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            jit = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            cap = JIT_LINES if jit else FUNCTION_LINES
            yield where(path, node), (node.end_lineno or first) - first + 1, cap
    else:
        for path, node in nodes(ast.ClassDef):
            methods = [x for x in node.body if isinstance(x, FUNCTIONS)]
            yield where(path, node), len(methods), CLASS_METHODS


def public(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Definitions of a module or class whose names are for others, methods included."""
    for node in body:
        if isinstance(node, ast.ClassDef | FUNCTIONS) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body)


@cache
def described() -> frozenset[str]:
    """Methods that a Protocol or a base class of ours describes: others need not say it again."""
    classes = [node for _, node in nodes(ast.ClassDef)]
    bases = {node: {ast.unparse(x).partition("[")[0] for x in node.bases} for node in classes}
    above = set().union(*bases.values())
    return frozenset(
        method.name
        for node in classes
        if node.name in above or "Protocol" in bases[node]
        for method in node.body
        if isinstance(method, FUNCTIONS) and ast.get_docstring(method)
    )


def test_every_public_thing_says_what_it_is_for() -> None:
    breaches = []
    for path in tree().modules.values():
        module = nodes_of(path)[0][0]
        assert isinstance(module, ast.Module)
        if not ast.get_docstring(module):
            breaches.append(f"{path.relative_to(REPOSITORY)}: the module")
        for node in public(module.body):
            said = ast.get_docstring(node) or node.name.endswith("_triton")  # it has a definition
            decorators = [ast.unparse(each) for each in node.decorator_list]
            said = said or any("overload" in x or x.endswith(".setter") for x in decorators)
            if not said and not (node.col_offset and node.name in described()):
                breaches.append(where(path, node))
    none_of(breaches)


def num_tensors(node: FUNCTIONS) -> int:
    """Parameters annotated as a tensor, also as one that may be None."""
    args = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    names = (ast.unparse(arg.annotation).split(" | ") for arg in args if arg.annotation)
    return sum("Tensor" in name for name in names)


def test_public_functions_of_tensors_say_their_shapes() -> None:
    """In the docstring, or where it refers to, or where a Protocol or base class describes them."""
    breaches = []
    for path in tree().modules.values():
        module = nodes_of(path)[0][0]
        assert isinstance(module, ast.Module)
        for node in public(module.body):
            if isinstance(node, ast.ClassDef) or num_tensors(node) < 2:
                continue
            said = ast.get_docstring(node) or ""
            elsewhere = node.name.endswith("_triton") or (
                node.col_offset and node.name in described()
            )
            if not (elsewhere or SHAPE.search(said) or REFERS.search(said)):
                breaches.append(where(path, node))
    none_of(breaches)


def swallows(handler: ast.ExceptHandler) -> bool:
    """A broad handler that neither raises nor ends the process nor looks at the exception."""
    caught = ast.unparse(handler.type) if handler.type else "BaseException"
    if not any(name in caught.split() for name in ("Exception", "BaseException")):
        return False
    return all(isinstance(each, ast.Pass | ast.Continue) for each in handler.body)


def test_no_exception_is_caught_bare_or_swallowed() -> None:
    handlers = nodes(ast.ExceptHandler)
    none_of([where(path, node) for path, node in handlers if not node.type or swallows(node)])


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
    sample = list(walk(ast.parse(SAMPLE)))
    names = imported("worker.cache.pages", Path("pages.py"), sample)
    assert {"worker.api", "ray.util", "worker.decode", "torch.nn"} <= names
    assert {"worker.cache.sibling", "worker.cache.sub.name", "worker.up.other"} <= names
    assert not {"ray", "torch"} & names
    typed = imported("worker.x", Path("x.py"), sample, for_types=True)
    assert {"ray", "torch"} <= typed
    package = imported(
        "worker.cache", Path("cache/__init__.py"), walk(ast.parse("from . import pages"))
    )
    assert "worker.cache.pages" in package


def test_rooms_are_folders_of_worker_or_files_at_its_root() -> None:
    assert room_of("worker.plan") == "contract"
    assert room_of("worker.kernels.gemm.x") == "kernels"
    assert not any(map(room_of, ("worker", "router.http.app", "cluster")))
