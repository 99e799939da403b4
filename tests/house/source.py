"""The files of the repository as the house rules read them."""

import ast
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("core", "frontend", "ipc", "kernels", "tools")


def known_files(*patterns: str) -> list[Path]:
    """Return the files of these patterns that git knows or would add, relative to ROOT."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(Path(name) for name in set(listed) if (ROOT / name).exists())


@cache
def product_trees() -> Mapping[Path, ast.Module]:
    """Return the parsed Python files of the product. They are parsed once for all rules; forget() drops them."""
    paths = [path for path in known_files("*.py") if path.parts[0] != "tests"]
    return {path: ast.parse((ROOT / path).read_text(), str(path)) for path in paths}


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a file, listed once: ast.walk() searches the tree again for each caller."""
    return nodes_below(tree)


def nodes_below(node: ast.AST) -> list[ast.AST]:
    """Return a node and all nodes below it, as ast.walk() has them, in a third of its time."""
    found = [node]
    for one in found:  # it grows
        for value in vars(one).values():
            if isinstance(value, ast.AST):
                found.append(value)
            elif isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
    return found


def forget() -> None:
    """Drop the trees and their nodes."""
    product_trees.cache_clear()
    nodes.cache_clear()
