"""What `.ci/audit` makes of pip-audit's words."""

import json
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / ".ci" / "audit"
SOUND = {"name": "attrs", "version": "26.1", "vulns": []}
SKIPPED = {"name": "kvlane", "skip_reason": "Dependency not found"}
VULNERABLE = {
    "name": "torch",
    "version": "2.1",
    "vulns": [
        {"id": "CVE-1", "fix_versions": ["2.2", "2.3"], "aliases": []},
        {"id": "CVE-2", "fix_versions": [], "aliases": []},
    ],
}
Verdict = Callable[[str, str], tuple[list[str], bool]]


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    loader = SourceFileLoader("audit", str(PATH))
    spec = spec_from_loader("audit", loader)
    assert spec is not None
    module: Any = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.dont_write_bytecode", True)
        loader.exec_module(module)
    return module.verdict


def said(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


def test_known_vulnerabilities_fail_and_are_named(verdict: Verdict) -> None:
    lines, is_well = verdict(said(SOUND, SKIPPED, VULNERABLE), "Found 2")
    assert not is_well
    assert lines == [
        "2 of 3 packages were looked up",
        "torch 2.1: CVE-1, mended by 2.2, 2.3",
        "torch 2.1: CVE-2, mended by no version yet",
    ]


def test_what_is_sound_passes(verdict: Verdict) -> None:
    assert verdict(said(SOUND, SKIPPED), "") == (["1 of 2 packages were looked up"], True)


@pytest.mark.parametrize(
    ("told", "error", "why"),
    [
        (said(SKIPPED, SKIPPED), "", "none of 2 packages could be looked up"),
        ("", "ConnectionError: no route", "ConnectionError: no route"),
        ("{}", "", "has told nothing"),
    ],
    ids=["no data", "no connection", "another form"],
)
def test_where_nothing_can_be_looked_up_it_says_so(
    verdict: Verdict, told: str, error: str, why: str
) -> None:
    [line], is_well = verdict(told, error)
    assert is_well
    assert line.startswith("SKIPPED: ")
    assert why in line
