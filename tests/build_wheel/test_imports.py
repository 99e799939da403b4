"""move_imports(): moved code means what it meant, and nothing else of it changes."""

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build_wheel.imports import HOME, PACKAGES, copy_moved, move_imports
from tests.build_wheel.suite import ROOT, moved
from tests.house.source import nodes_below

pytestmark = pytest.mark.checkout


@pytest.mark.parametrize(
    ("source", "moved"),
    [
        ("from core.engine import EngineCore", "from engine_core.core.engine import EngineCore"),
        ("from core import log as l, lease", "from engine_core.core import log as l, lease"),
        ("import ipc", "import engine_core.ipc as ipc"),
        ("import ipc.hub", "import engine_core.ipc.hub, engine_core.ipc as ipc"),
        ("import ipc.hub as hub, os", "import engine_core.ipc.hub as hub, os"),
        ("from core import (  # core\n    log,\n)", "from engine_core.core import (  # core\n    log,\n)"),
        ("from \\\n  core . log \\\n import say", "from \\\n  engine_core.core . log \\\n import say"),
        ("if a: import ipc; from ipc import b", "if a: import engine_core.ipc as ipc; from engine_core.ipc import b"),
        ("é = 1; import core.é", "é = 1; import engine_core.core.é, engine_core.core as core"),
        ("def f():\n\tfrom\tkernels import x\r\n", "def f():\n\tfrom\tengine_core.kernels import x\r\n"),
    ],
)  # fmt: skip
def test_imports_are_moved(source: str, moved: str) -> None:
    assert move_imports(source) == moved


@pytest.mark.parametrize(
    "source",
    [
        "from . import core",
        "from .core import x",
        "from .. core import x",
        "from corecore import core",
        "import os.core, numpy as core, corex, ipcs.core",
        "from corex import core",
        "from engine_core import LLM",
        "'import core'; f'{core}import core'  # import core",
        "core.x = core['from core import x'](core)",
        'def f():\n    """\n    from core import log\n    """\n    yield from core',
        "raise core from ipc",
    ],
)
def test_what_is_no_import_of_these_stays(source: str) -> None:
    assert move_imports(source) == source


#: Each statement that has others in it, with an import in each of its places.
COMPOUND = """
def f():
    import core
async def g():
    async with a: import core
    async for b in c: import core
    else: import core
class C: import core
if a: import core
elif b: import core
else: import core
for a in b: import core
else: import core
while a: import core
else: import core
with a: import core
try: import core
except A: import core
else: import core
finally: import core
try: import core
except* A: import core
match a:
    case 1: import core
    case _:
        if a:
            import core
"""


def test_imports_within_any_statement_are_moved() -> None:
    assert move_imports(COMPOUND) == COMPOUND.replace("import core", "import engine_core.core as core")


def test_what_is_no_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        move_imports("import core.")


# --- any statements ------------------------------------------------------------------------------------------------

PATHS = st.sampled_from(["core", "core.a", "core.a.b", "ipc", "ipc.a", "os", "os.path", "xcore.ipc", "corex"])
NAMES = st.sampled_from(["core", "ipc", "os", "one", "two"])
SPACE = st.sampled_from([" ", "  ", "\t", " \\\n", "\\\n "])


@st.composite
def import_statements(draw: st.DrawFn) -> str:
    def named(path: str) -> str:
        return f"{path}{draw(SPACE)}as{draw(SPACE)}{draw(NAMES)}" if draw(st.booleans()) else path

    if draw(st.booleans()):
        paths = draw(st.lists(PATHS, min_size=1, max_size=4))
        return f"import{draw(SPACE)}" + f",{draw(st.sampled_from(['', ' ']))}".join(map(named, paths))
    names = [named(name) for name in draw(st.lists(NAMES, min_size=1, max_size=3))]
    listed = draw(st.sampled_from(["{}", "({})", "(\n  {},  # import core\n)"])).format(", ".join(names))
    level = draw(st.sampled_from(["", "", "", ".", "..", ". "]))
    return f"from{draw(SPACE)}{level}{draw(PATHS)}{draw(SPACE)}import{draw(SPACE)}{listed}"


OTHERS = st.sampled_from(
    ["core = 'import core'", '"""\nfrom core import x\n"""', "x = [ipc]  # import ipc", "", "ä = 'ö' or core.ipc"]
)


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Statements, some on one line, some within a block."""
    text = ""
    for statement in draw(st.lists(import_statements() | OTHERS, max_size=6)):
        text += draw(st.sampled_from(["{}\n", "pass; {}\n", "if True: {}\n", "if True:\n    pass\n    {}\n"])).format(
            statement or "pass"
        )
    return text


def statements(tree: ast.Module) -> list[ast.AST]:
    """All statements of a program. A tenth of its nodes: no expression has an import."""
    found: list[ast.AST] = [tree]
    for one in found:  # it grows
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(one, field, ())
    return found


def meaning(source: str) -> tuple[list[tuple[str, str]], set[str]]:
    """(name, what it is bound to) in order, and the modules that are loaded, parents too: by their checkout names."""
    bound: list[tuple[str, str]] = []
    loaded: set[str] = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                bound.append((alias.asname, alias.name) if alias.asname else (first, first))
                loaded.add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            bound += [(alias.asname or alias.name, f"{module}:{alias.name}") for alias in node.names]
            loaded.add(module)
    in_order = [(name, target.removeprefix(f"{HOME}.")) for name, target in bound if name != HOME]
    places = [module.removeprefix(f"{HOME}.").split(".") for module in loaded if module != HOME]
    return in_order, {".".join(parts[:count]) for parts in places for count in range(1, len(parts) + 1)}


class WithoutImports(ast.NodeTransformer):
    def visit_Import(self, node: ast.stmt) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node)

    visit_ImportFrom = visit_Import


def rest(source: str) -> tuple[str, list[int], list[tuple[int, str]]]:
    """All that is no import: the tree, the line of each statement, and comments with their lines."""
    tree = WithoutImports().visit(ast.parse(source))
    lines = [node.lineno for node in nodes_below(tree) if isinstance(node, ast.stmt)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return ast.dump(tree), lines, [(one.start[0], one.string) for one in tokens if one.string[:1] == "#"]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(programs())
def test_a_moved_program_means_the_same(source: str) -> None:
    moved = move_imports(source)
    assert meaning(moved) == meaning(source)
    assert rest(moved) == rest(source)
    assert len(moved.splitlines()) == len(source.splitlines())
    assert move_imports(moved) == moved, "nothing is left to move"


def test_the_test_sees_a_wrong_move() -> None:
    assert meaning("import engine_core.core.a") != meaning("import core.a"), "core is not bound"
    assert meaning("import engine_core.ipc as core") != meaning("import core")
    assert rest("# import engine_core.core") != rest("# import core")


# --- this checkout -------------------------------------------------------------------------------------------------


def imported(path: Path) -> Iterator[str]:
    """First parts of the modules that a file imports."""
    for module in meaning(path.read_text())[1]:
        yield module.partition(".")[0]


def test_a_folder_is_copied_with_its_imports_moved(tmp_path: Path) -> None:
    copy_moved(ROOT / "kernels", tmp_path / "kernels")
    copied = sorted(path.relative_to(tmp_path) for path in (tmp_path / "kernels").rglob("*") if path.is_file())
    assert copied == sorted(
        path.relative_to(ROOT)
        for path in (ROOT / "kernels").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    assert (tmp_path / "kernels/cpu/c/products/gemm.c").read_bytes() == (
        ROOT / "kernels/cpu/c/products/gemm.c"
    ).read_bytes()
    sources = [path for path in (tmp_path / "kernels").rglob("*.py") if "kernels" in set(imported(path))]
    assert len(sources) > 10
    assert not [path for path in sources if move_imports(path.read_text()) != path.read_text()]


def whole_statement(lines: list[str]) -> str:
    """The statement that these lines begin with. Parsing it takes a thousandth of the time of parsing its file."""
    for end in range(1, len(lines) + 1):
        text = textwrap.dedent("".join(lines[:end]))
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        return text
    raise ValueError(lines[0])


def differing_statements(source: str, other: str) -> list[tuple[str, str]]:
    """The statements that begin in lines that differ, of both programs."""
    lines, others = (text.splitlines(keepends=True) for text in (source, other))
    assert len(lines) == len(others)
    places = [place for place, line in enumerate(lines) if line != others[place]]
    return [(whole_statement(lines[place:]), whole_statement(others[place:])) for place in places]


@pytest.mark.parametrize("package", [HOME, *PACKAGES])
def test_every_file_means_the_same(package: str) -> None:
    """All other lines are as they were."""
    for path in (ROOT / package).rglob("*.py"):
        for statement, after in differing_statements(path.read_text(), moved(path)):
            assert meaning(after) == meaning(statement), path
            assert rest(after) == rest(statement), path


def test_a_statement_that_differs_is_found_whole() -> None:
    source = "a = 1\nif a:\n    from core import (\n        b,\n    )\n"
    found = ("from core import (\n    b,\n)\n", "from engine_core.core import (\n    b,\n)\n")
    assert differing_statements(source, move_imports(source)) == [found]
    assert differing_statements("a = 'b'\nc\n", "a = 'c'\nc\n") == [("a = 'b'\n", "a = 'c'\n")]


#: What a string, or a part of one, with such a name begins with. Few files have one, and only these are parsed.
NAMED = re.compile(rf"""["'}}](?:{"|".join(PACKAGES)})\b""")


def modules_named_by_text(source: str) -> set[str]:
    """Modules of this checkout that are the whole of a string, or that `-m` starts."""
    if not NAMED.search(source):
        return set()
    texts = {node.value for node in nodes_below(ast.parse(source)) if isinstance(node, ast.Constant)}
    dotted = {text for text in texts if isinstance(text, str) and text.partition(".")[0] in PACKAGES and "." in text}
    return {name for name in dotted if Path(ROOT, *name.split(".")).with_suffix(".py").is_file()} | {
        name for name in re.findall(r"""["']-m["'], ["'](\w+)""", source) if name in PACKAGES
    }


def test_no_module_is_named_by_text() -> None:
    """A module has another name in a wheel. Modules named in text get the prefix from tools/command_table.py,
    frontend/engine/supervised_engine.py or run_package(); core/capture/state_classes.py and
    tools/commands/replay/shrink/written.py find the prefix in their own names.
    """
    assert modules_named_by_text("x('core.log'); y = ['-m', 'core']; 'core.nothing'") == {"core.log", "core"}
    found = {path: modules_named_by_text(path.read_text()) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    named = {str(path.relative_to(ROOT)): names for path, names in found.items() if names}
    assert named.pop("core/capture/state_classes.py") == {"core.capture.state_classes"}
    assert named.pop("tools/commands/replay/shrink/written.py") == {"tools.commands.replay.shrink.written"}
    assert named.pop("frontend/engine/supervised_engine.py") == {"core.capture.write_flight"}
    assert named.pop("core/grammars/checker.py") == {"core.grammars.check"}  # for run_package()
    assert named.pop("frontend/engine/ray_workers.py") == {"tools.cli"}  # likewise
    assert named.pop("frontend/text/request_templates.py") == {"frontend.text.template_process"}  # likewise
    assert named.pop("tools/cli.py") == {"tools.commands.completion"}
    assert named.keys() == {"tools/command_table.py"}


def test_what_a_test_replaces_is_there_in_a_wheel_too() -> None:
    """It is named by an object, or by a text that begins with PREFIX (tests/placed.py)."""
    plain = re.compile(rf'setattr\(\s*f?"(?:{"|".join(PACKAGES)})\.')
    assert plain.search("setattr" + '("core.log.x", 1)')
    found = {str(path): plain.findall(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    assert {path for path, names in found.items() if names} == set()
