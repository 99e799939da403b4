"""Imports of a wheel's modules: `core.engine` of the checkout is `engine_core.core.engine` in a wheel.

A checkout has its packages in its top folder, where editors, type checkers and editable installs find them. A wheel has
all of them in one package, so that it uses only one name of the user's environment. Only import statements are changed:
a module name made at run time must be derived from `__name__` or `__package__`. Standard library only.
"""

import ast
import re
import shutil
from collections.abc import Collection, Iterator
from itertools import accumulate
from pathlib import Path

PACKAGES = ("core", "frontend", "ipc", "kernels", "tools")
HOME = "engine_core"
#: Fields of statements, handlers and cases that are lists of such.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_FROM = re.compile(rb"from(?:[ \t\f]|\\(?:\r\n|\r|\n))*")


def move_imports(source: str, packages: Collection[str] = PACKAGES, home: str = HOME) -> str:
    """Return this Python source with imports of the top-level `packages` changed to imports from the package `home`.

    Each statement stays on its line and binds the names that it bound before (`import core.engine` binds `home` too).
    Relative imports, strings and comments stay as they are. Errors: SyntaxError.
    """
    content = source.encode()
    starts = [0, *accumulate(map(len, content.splitlines(keepends=True)))]  # offset of each line, in bytes
    insertions: list[tuple[int, str]] = []
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in packages:
                    begin, end = _span(alias, starts)
                    insertions += [(begin, f"{home}."), (end, _binding(alias, home))]
        elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] in packages:
            keyword = _FROM.match(content, _span(node, starts)[0])
            assert keyword is not None, node.module
            insertions.append((keyword.end(), f"{home}."))
    for offset, text in sorted(insertions, reverse=True):
        content = content[:offset] + text.encode() + content[offset:]
    return content.decode()


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements. They are a tenth of the nodes that ast.walk() visits: no expression has an import."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        yield node
        for field in _BLOCKS:
            left += getattr(node, field, ())


def _binding(alias: ast.alias, home: str) -> str:
    """Return the text after a moved `import a.b` that binds the name `a` as before."""
    package, _, rest = alias.name.partition(".")
    if alias.asname is not None:
        return ""
    return f", {home}.{package} as {package}" if rest else f" as {package}"


def _span(node: ast.alias | ast.stmt, starts: list[int]) -> tuple[int, int]:
    """Return the offsets of a node's first byte and of the byte after its last."""
    assert node.end_lineno is not None, node
    assert node.end_col_offset is not None, node
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def copy_moved(source: Path, target: Path, *left_out: str) -> None:
    """Copy a folder without caches, and move the imports of its Python files.

    left_out: patterns of names of files that are not copied. Errors: OSError, SyntaxError.
    """

    def copy(old: str, new: str) -> None:
        if old.endswith(".py"):
            Path(new).write_bytes(move_imports(Path(old).read_bytes().decode()).encode())
        else:
            shutil.copyfile(old, new)

    ignored = shutil.ignore_patterns("__pycache__", ".*", *left_out)
    shutil.copytree(source, target, ignore=ignored, copy_function=copy)
