"""Words of Markdown by group, and what pages and code refer to: all of it lies in this repository.

`python -m tests.support.structure` prints the words of each group.
"""

import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.structure import PACKAGES, REPOSITORY, num_words, tracked

MAX_WORDS = {"pages": 18_000, "ADRs": 14_000, "results": 6_000}  # CHANGELOG has no limit
MAX_WORDS_OF_WORKER = 900
CUT = "cut what is said twice or decides nothing now, or raise the limit by an ADR with the count"
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?\)")
PAGE = re.compile(r"(?<![\w./-])((?:[\w.-]+/)*[\w.-]+\.md)\b")
ABOVE = re.compile(r"(?<![\w./])((?:\.\./)+[\w./-]*\w)")
NUMBER = re.compile(r"\bADRs? (\d{4})")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Programs ask for these paths, which are no pages.
ASKED_FOR = {"../../etc/passwd", "../a"}


@cache
def files() -> frozenset[str]:
    """Every tracked file and its folders, relative to the repository."""
    paths = [path.relative_to(REPOSITORY) for path in tracked(REPOSITORY, "*")]
    return frozenset(str(each) for path in paths for each in (path, *path.parents))


@cache
def pages() -> tuple[str, ...]:
    return tuple(name for group in num_words().values() for name in group)


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def beside(name: str, path: str) -> str | None:
    """Where a relative path in the file `name` leads; None: out of the repository."""
    target = (REPOSITORY / name).parent.joinpath(path).resolve()
    return str(target.relative_to(REPOSITORY)) if target.is_relative_to(REPOSITORY) else None


def anchors(name: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = HEADING.findall(FENCE.sub("", text_of(name)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(name: str, text: str) -> Iterator[str]:
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = beside(name, path) if path else name
        if target not in files():
            yield f"{name}: no file of this repository: {link}"
        elif anchor and target.endswith(".md") and anchor not in anchors(target):
            yield f"{name}: no such heading: {link}"


def strangers(name: str, text: str) -> Iterator[str]:
    """What a page or a module names that is not of this repository."""
    for page in set(PAGE.findall(text)):
        known = any(each == page or each.endswith(f"/{page}") for each in pages())
        if not known and beside(name, page) not in files():
            yield f"{name}: no page of this repository: {page}"
    for path in set(ABOVE.findall(text)) - ASKED_FOR:
        if beside(name, path) not in files():
            yield f"{name}: no path of this repository: {path}"


def numbers() -> dict[str, set[str]]:
    """Package -> the numbers in its index of ADRs."""
    found = {package: f"{package}/adr/README.md" for package in (*PACKAGES, "deploy")}
    return {
        package: set(re.findall(r"^- \[?(\d{4})\b", text_of(index), re.MULTILINE))
        for package, index in found.items()
    }


@pytest.mark.parametrize("group", MAX_WORDS)
def test_a_group_of_pages_has_few_enough_words(group: str) -> None:
    words = num_words()[group]
    longest = sorted(words, key=words.__getitem__, reverse=True)[:5]
    assert sum(words.values()) <= MAX_WORDS[group], f"{group}: {CUT}. The longest: {longest}"


def test_the_readme_of_worker_is_read_at_once() -> None:
    assert num_words()["pages"]["worker/README.md"] <= MAX_WORDS_OF_WORKER, CUT


def test_links_of_pages_lead_to_tracked_files_and_headings() -> None:
    assert [each for name in pages() for each in broken_links(name, text_of(name))] == []


def test_pages_and_code_point_to_nothing_outside_the_repository() -> None:
    modules = [str(path.relative_to(REPOSITORY)) for path in tracked(REPOSITORY, "*.py")]
    modules.remove("tests/unit/test_words.py")  # it names some, to be noticed
    assert [each for name in (*pages(), *modules) for each in strangers(name, text_of(name))] == []


def test_every_adr_has_one_line_in_the_index_of_its_package() -> None:
    known = numbers()
    for package, listed in known.items():
        index = text_of(f"{package}/adr/README.md")
        for path in (REPOSITORY / package / "adr").glob("[0-9]*.md"):
            assert index.count(f"\n- [{path.name[:4]}]({path.name})") == 1, path
        assert listed == {f"{number:04d}" for number in range(1, len(listed) + 1)}, package
    for path in tracked(REPOSITORY, "*.py") + [REPOSITORY / name for name in pages()]:
        package = path.relative_to(REPOSITORY).parts[0]
        here = known.get(package, set[str]().union(*known.values()))
        text = path.read_text(encoding="utf-8")
        assert set(NUMBER.findall(text)) <= here, f"{path}: no such ADR"


@pytest.mark.parametrize(
    "text",
    ["[a](../shared/design/A.md)", "[a](no-such.md)", "[a](#no-such-heading)", "[a](/etc/passwd)"],
)
def test_a_link_that_leads_nowhere_is_noticed(text: str) -> None:
    assert list(broken_links("README.md", text))


@pytest.mark.parametrize("text", ["as DESIGN.md says", "(DESIGN.md 3.)", "in ../shared/data."])
def test_what_is_outside_is_noticed(text: str) -> None:
    assert list(strangers("worker/plan.py", text))
    assert not list(strangers("worker/plan.py", "README.md, deploy/NETWORKS.md, ../README.md"))
