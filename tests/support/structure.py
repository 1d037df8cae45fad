"""The structure of the three packages, from their own syntax trees.

    python -m tests.support.structure [REPO]          lines, words, rooms, arrows, floors
    python -m tests.support.structure --decode-step   the files that one decode step runs through
    python -m tests.support.structure --wide [REPO]   functions of six parameters and more

A room of `worker` is a folder, or a file at its root; `TOGETHER` says which of them are one. An
arrow is an import from one room to another, and floors are the length of the longest chain of
arrows. Imports inside functions count, `TYPE_CHECKING` blocks do not. Parameters count with `self`;
those of kernels and of their definitions do not.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path

import networkx

PACKAGES = ("worker", "router", "cluster")
REPOSITORY = Path(__file__).parents[2]
IMPORTING = ("import_module", "__import__")


class Tree:
    """The modules of a checkout and what they import.

    Args:
        root: of the checkout.
        for_types: with what `if TYPE_CHECKING` imports.
    """

    def __init__(self, root: Path = REPOSITORY, *, for_types: bool = False) -> None:
        self.root, self._for_types = root, for_types

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Dotted name -> file, packages by their own name."""
        found = {}
        for package in PACKAGES:
            for path in sorted((self.root / package).rglob("*.py")):
                parts = path.relative_to(self.root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return found

    @cached_property
    def imports(self) -> dict[str, frozenset[str]]:
        """Module -> every dotted name that it imports."""
        return {
            module: frozenset(imported(module, path, nodes_of(path), for_types=self._for_types))
            for module, path in self.modules.items()
        }

    @cached_property
    def edges(self) -> dict[str, frozenset[str]]:
        """Module -> our own modules that it imports."""
        return {
            module: frozenset(name for name in names if name in self.modules and name != module)
            for module, names in self.imports.items()
        }

    def lines(self, package: str) -> list[int]:
        """Of each file, ascending."""
        return sorted(
            len(path.read_text().splitlines())
            for module, path in self.modules.items()
            if module.split(".")[0] == package
        )

    def rooms(self) -> dict[str, set[str]]:
        """Room of worker -> the other rooms that it imports from."""
        found: dict[str, set[str]] = {}
        for module, names in self.edges.items():
            if (room := room_of(module)) is None:
                continue
            others = found.setdefault(room, set())
            others |= {other for name in names if (other := room_of(name)) not in (None, room)}
        return found


# Modules that are one room: what every process shares, and the page of decode with its requests.
TOGETHER = dict.fromkeys(
    ("api", "config", "errors", "keyring", "plan", "registry", "seldom", "wire"), "contract"
) | {"requests": "decode"}


def room_of(module: str) -> str | None:
    """Room of a dotted name; None: not in worker, or worker itself."""
    package, _, rest = module.partition(".")
    room = rest.split(".")[0]
    if package != "worker" or not rest:
        return None
    return TOGETHER.get(room, room)


@cache
def nodes_of(path: Path) -> tuple[tuple[ast.AST, bool], ...]:
    """What `walk` yields of a file, whose module is the first node."""
    return tuple(walk(ast.parse(path.read_text(), str(path))))


def walk(root: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes, and whether they run: those of `if TYPE_CHECKING` bodies do not."""
    left: list[tuple[ast.AST, bool]] = [(root, True)]
    while left:
        node, runs = left.pop()
        yield node, runs
        for_types = isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING"
        hidden = set(map(id, node.body)) if for_types else ()
        children = ast.iter_child_nodes(node)
        left += [(child, runs and id(child) not in hidden) for child in children]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def imported(
    module: str, path: Path, nodes: Iterable[tuple[ast.AST, bool]], *, for_types: bool = False
) -> set[str]:
    """Every dotted name that the module imports, `from a import b` as a and a.b.

    nodes: see `walk`; for_types: with what `if TYPE_CHECKING` imports.
    """
    names: set[str] = set()
    for node, runs in nodes:
        if not (runs or for_types):
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (path.name == "__init__.py")]
                base = ".".join([*parts, *([base] if base else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _last_name(node.func) in IMPORTING:
            names.update(a.value for a in node.args[:1] if isinstance(a, ast.Constant))
    return names


def is_of_kernel(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a kernel, or what defines or launches one."""
    apart = (
        "kernels" in path.parts
        or path.stem.endswith(("_triton", "_gluon"))
        or path.stem.startswith("peer_")
    )
    return apart or function.name.endswith("_ref")


def wide_functions(tree: Tree, num: int = 6) -> list[tuple[str, int]]:
    """(where, number of parameters) of each function that has `num` and more."""
    wide = []
    for path in tree.modules.values():
        for node, _ in nodes_of(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            args = node.args
            count = len(args.posonlyargs + args.args + args.kwonlyargs)
            if count >= num and not is_of_kernel(path, node):
                wide.append((f"{path.relative_to(tree.root)}:{node.lineno} {node.name}", count))
    return wide


def tracked(root: Path, pattern: str) -> list[Path]:
    names = subprocess.check_output(["git", "ls-files", "-z", pattern], cwd=root, text=True)
    return [path for name in names.split("\0") if name and (path := root / name).is_file()]


# Groups of Markdown, each with what its paths have; the first that fits counts.
GROUPS_OF_PAGES = {
    "changelog": re.compile(r"^CHANGELOG\.md$"),
    "ADRs": re.compile(r"/adr/"),
    "results": re.compile(r"^benchmarks/results/"),
    "pages": re.compile(""),
}


def num_words(root: Path = REPOSITORY) -> dict[str, dict[str, int]]:
    """Group -> path of each page of it, relative to `root` -> its words, as `wc -w` counts them."""
    groups: dict[str, dict[str, int]] = {group: {} for group in GROUPS_OF_PAGES}
    for page in tracked(root, "*.md"):
        name = page.relative_to(root).as_posix()
        group = next(group for group, has in GROUPS_OF_PAGES.items() if has.search(name))
        groups[group][name] = len(page.read_text(encoding="utf-8").split())
    return groups


def knots(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node."""
    components = networkx.strongly_connected_components(digraph(graph))
    return [sorted(component) for component in components if len(component) > 1]


def num_floors(rooms: Mapping[str, Iterable[str]]) -> int:
    """Rooms on the longest chain of arrows; there must be no circle."""
    return 1 + networkx.dag_longest_path_length(digraph(rooms))


def digraph(graph: Mapping[str, Iterable[str]]) -> networkx.DiGraph:
    return networkx.DiGraph({node: list(others) for node, others in graph.items()})


def figures(tree: Tree) -> dict[str, float]:
    """Name -> what of a checkout has a cap: lines by folder, and what makes reading slow."""
    found: dict[str, float] = {package: sum(tree.lines(package)) for package in PACKAGES}
    found["product"] = product = sum(found.values())
    for folder in ("tests", "benchmarks"):
        files = tracked(tree.root, f"{folder}/*.py")
        found[folder] = sum(len(path.read_text().splitlines()) for path in files)
    found["tests / product"] = found["tests"] / product
    found["wide functions"] = len(wide_functions(tree))
    texts = (path.read_text() for path in tree.modules.values())
    found["each"] = sum(len(re.findall(r"\beach\b", text)) for text in texts)
    rooms = tree.rooms()
    found["rooms"], found["arrows"] = len(rooms), sum(map(len, rooms.values()))
    return found


def main(root: Path) -> None:
    tree = Tree(root)
    for package in PACKAGES:
        sizes = tree.lines(package)
        median, longest = sizes[len(sizes) // 2], sizes[-1]
        print(f"{package}: {len(sizes)} files, median {median} lines, longest {longest}")
    for name, number in figures(tree).items():
        print(f"{name}: {number:.5g}")
    groups = num_words(root)
    print(f"Markdown: {sum(sum(pages.values()) for pages in groups.values())} words")
    for group, pages in groups.items():
        print(f"  {group}: {len(pages)} files, {sum(pages.values())} words")
    circles = knots(rooms := tree.rooms())
    print("floors:", "a circle" if circles else num_floors(rooms))
    for circle in circles:
        print("circle:", *circle)


def decode_step() -> None:
    from tests.support.decode_step import files_of_a_step

    files = files_of_a_step()
    for name, num_lines in files.items():
        print(f"{num_lines:5d} {name}")
    print(f"one decode step: {len(files)} files, {sum(files.values())} lines")


if __name__ == "__main__":
    repositories = [Path(arg).resolve() for arg in sys.argv[1:] if not arg.startswith("-")]
    if "--decode-step" in sys.argv:
        decode_step()
    elif "--wide" in sys.argv:
        for place, number in wide_functions(Tree(*repositories)):
            print(f"{number:3d} {place}")
    else:
        main(*repositories or (REPOSITORY,))
