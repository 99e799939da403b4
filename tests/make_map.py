"""Make docs/map.md: one line for each file of the product, the first sentence of its docstring."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "map.md"

_HEAD = """# Map of the code

One line for each file: the first sentence of its docstring. `make map` makes this page, and a test compares it with the
code. ARCHITECTURE.md says how the parts work together.
"""


def product_files() -> list[Path]:
    """Return the Python files that git knows or would add, but for tests and empty files, relative to ROOT."""
    found = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    paths = [Path(name) for name in found if (ROOT / name).exists()]
    return sorted(path for path in paths if path.parts[0] != "tests" and (ROOT / path).read_text().strip())


def first_sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring, on one line; AssertionError for a file that has none."""
    source = (ROOT / path).read_text()
    head = re.match(r'"""(?:[^"\\]|"(?!""))*"""', source)  # the whole file takes 100 times as long to parse
    text = ast.get_docstring(ast.parse(head[0] if head else source))
    assert text, f"{path} has no docstring"
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"\.\s+(?=[A-Z])", paragraph)[0].rstrip(".")


def made() -> str:
    """Return the page."""
    lines, folder = [_HEAD], None
    for path in sorted(product_files(), key=lambda path: (path.parent.parts, path.name)):
        if path.parent != folder:
            folder = path.parent
            package = ROOT / folder / "__init__.py"
            about = ast.get_docstring(ast.parse(package.read_text())) if package.exists() else None
            lines.append(f"\n## {folder}/\n" if folder.parts else "\n## The top folder\n")
            if about:
                lines.append(f"{' '.join(about.split())}\n")
        if path.name != "__init__.py":
            lines.append(f"- `{path.name}`: {first_sentence(path)}")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(made())
