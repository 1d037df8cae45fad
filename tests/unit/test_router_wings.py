"""The wings of the router, and which of them may import which."""

from tests.support.structure import REPOSITORY, Tree

# A wing imports from those before it in this list; all import from the root's modules.
WINGS = ("text", "observe", "dispatch", "openai", "show", "http")
ROOT = {"__init__.py", "config.py", "errors.py"}


def wing_of(module: str) -> str | None:
    """The wing of a module of the router; None: it stands at the root, or elsewhere."""
    parts = module.split(".")
    return parts[1] if parts[0] == "router" and len(parts) > 1 and parts[1] in WINGS else None


def test_wings_import_from_those_before_them() -> None:
    breaches = [
        f"{module} imports {name}"
        for module, names in Tree().edges.items()
        for name in names
        if (upper := wing_of(module)) is not None
        and (lower := wing_of(name)) is not None
        and WINGS.index(lower) > WINGS.index(upper)
    ]
    assert not breaches, "\n".join(sorted(breaches))


def test_the_root_imports_from_no_wing() -> None:
    tree = Tree()
    breaches = [
        f"{module} imports {name}"
        for module, names in tree.edges.items()
        if module.split(".")[0] == "router" and wing_of(module) is None
        for name in names
        if wing_of(name) is not None
    ]
    assert not breaches, "\n".join(sorted(breaches))


def test_every_module_stands_in_a_wing() -> None:
    root = REPOSITORY / "router"
    assert {path.name for path in root.glob("*.py")} == ROOT
    assert {path.parent.name for path in root.glob("*/__init__.py")} == set(WINGS)
