"""The Markdown pages: their width, their links, the index, and the recipes for contributors."""

import re
from pathlib import Path

import pytest

from tests.house.source import ROOT, known_files
from tests.wrap_pages import WIDTH, long_lines, pages, wrapped

pytestmark = pytest.mark.checkout

#: [text](target), without images' sizes and titles.
_LINK = re.compile(r"\]\(([^)\s]+)\)")
RECIPES = Path("docs/contributing")


def links(page: Path) -> list[str]:
    """Return the targets within the repository that a page links to, without their anchors."""
    text = re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`", "", (ROOT / page).read_text())
    return [target.partition("#")[0] for target in _LINK.findall(text) if not re.match(r"\w+:|#", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", (ROOT / page).read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_lines_are_not_longer_than_the_width() -> None:
    """`python -m tests.wrap_pages` wraps them."""
    found = {str(page): long_lines((ROOT / page).read_text()) for page in pages()}
    assert {page: lines for page, lines in found.items() if lines} == {}


def test_links_lead_to_files() -> None:
    broken = [f"{page}: {target}" for page in known_files("*.md") for target in links(page) if _is_broken(page, target)]
    assert broken == []


def _is_broken(page: Path, target: str) -> bool:
    return not (ROOT / page.parent / target).exists()


def test_links_lead_to_headings() -> None:
    broken = []
    for page in known_files("*.md"):
        for target in re.findall(r"\]\(([\w./\-]*\.md)?#([\w\-]+)\)", (ROOT / page).read_text()):
            other = page.parent / target[0] if target[0] else page
            if (ROOT / other).exists() and target[1] not in anchors(other):
                broken.append(f"{page}: {target[0]}#{target[1]}")
    assert broken == []


def test_the_index_has_every_page() -> None:
    listed = {str(Path("docs") / target) for target in links(Path("docs/README.md"))}
    folders = {str(Path(name).parent) for name in listed if name.endswith("/README.md")}
    missing = [
        str(page)
        for page in known_files("docs/*.md")
        if str(page) not in listed and str(page.parent) not in folders and page.name != "README.md"
    ]
    assert missing == []


def test_each_recipe_names_files_and_tests() -> None:
    recipes = [page for page in known_files(f"{RECIPES}/*.md") if page.name != "README.md"]
    assert {page.name for page in recipes} == {target for target in links(RECIPES / "README.md") if "/" not in target}
    for page in recipes:
        text = (ROOT / page).read_text()
        assert re.search(r"(?m)^\| `?[\w ]", text), f"{page} has no table of files"
        assert re.search(r"\*\*Tests?:\*\* ", text), f"{page} names no test"


def blocks(text: str) -> list[str]:
    """Return a page's blocks of code, fenced or indented."""
    fenced = r"(?ms)^ *```\w*\n(.*?)^ *```"
    return [*re.findall(fenced, text), *re.findall(r"(?m)^    .*$", re.sub(fenced, "", text))]


def test_no_path_below_tmp_is_used_by_two_pages() -> None:
    """Who runs the commands of two pages finds no file, socket or key of the first in the way of the second."""
    users: dict[str, set[str]] = {}
    for page in known_files("*.md"):
        for block in blocks((ROOT / page).read_text()):
            for path in re.findall(r"(?<![\w.])/tmp/[\w.-]+", block):
                users.setdefault(path, set()).add(str(page))
    assert len(users) > 20
    assert {path: sorted(names) for path, names in users.items() if len(names) > 1} == {}


def test_each_loop_of_a_page_ends() -> None:
    """A loop that waits for a server ends if the server does not come: for i in $(seq 60); do ... && break; ..."""
    endless = [
        f"{page}: {line}"
        for page in known_files("*.md")
        for block in blocks((ROOT / page).read_text())
        for line in block.splitlines()
        if re.match(r"\$? *(until|while) .*; *do\b", line)
    ]
    assert endless == []


def test_contributing_has_every_target_of_make() -> None:
    phony = re.findall(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text())[0].split()
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [target for target in phony if not re.search(rf"`(?:make )?{target}`", text)] == []


def test_wrapping_keeps_what_has_a_form() -> None:
    long = "word " * 40
    kept = f"```\n{long}\n```\n\n| {long} |\n\n    {long}\n\n# {long}\n\nshort\nlines\n"
    assert wrapped(kept) == kept
    assert long_lines(kept) == []
    item = wrapped(f"- {long}\n  and its end\n- next\n").split("\n")
    assert item[-2:] == ["- next", ""]
    assert all(line.startswith(("  word", "- word")) for line in item[:-2])
    assert max(map(len, item)) <= WIDTH
    assert long_lines(f"{long}\n") == [long]
    number = wrapped(f"{'x' * 60} {'y' * 50} in 400. Then - {'z' * 40}\n").split("\n")
    assert [line.split()[0] for line in number if line] == ["x" * 60, "in"]
    assert wrapped(f"a multiple of\n32. {long}\n").startswith("a multiple of 32. word")
