"""Rules of the house that no linter checks. (ruff, mypy and import-linter run before the tests: `make check`.)"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import ROOT, known_files, nodes, product_trees
from tests.make_map import PAGE, made

pytestmark = pytest.mark.checkout

PACKAGES = ("build_wheel", "core", "engine_core", "frontend", "ipc", "kernels", "tools")
MAX_LINES = 600
MAX_FUNCTION_LINES = 60

#: The pure part of the core; nothing it loads may know the time, chance or the environment.
PURE = ("core.scheduling.scheduler", "core.engine")
IMPURE_MODULES = {"time", "datetime", "random", "secrets", "uuid", "os", "socket", "threading", "asyncio"}
#: Names whose value differs from run to run, or that run what they are given.
IMPURE_CALLS = {"hash", "id"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec"}


def tracked_files() -> list[Path]:
    return known_files("*.py")


def product() -> dict[Path, ast.Module]:
    return {path: tree for path, tree in product_trees().items() if path.parts[0] in PACKAGES}


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """First parts of all module names imported anywhere in the file."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def called_names(tree: ast.Module) -> Iterator[str]:
    """Bare names that are called: f of f(...), not of x.f(...)."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def trusted_input(tree: ast.Module) -> list[str]:
    """What in this file runs code that came with its input."""
    found = [f"imports {name}" for name in imported_modules(tree) if name in FORBIDDEN_MODULES]
    found += [f"calls {name}()" for name in called_names(tree) if name in FORBIDDEN_CALLS]
    keywords = [keyword for node in nodes(tree) if isinstance(node, ast.Call) for keyword in node.keywords]
    trusting = [one for one in keywords if one.arg == "trust_remote_code" and not _is_false(one.value)]
    found += ["passes trust_remote_code"] * len(trusting)
    refused = [keyword for keyword in keywords if keyword.arg == "weights_only" and _is_false(keyword.value)]
    return found + ["loads more than weights"] * len(refused)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def loaded_by(statement: str) -> set[str]:
    """Modules in sys.modules of a fresh interpreter after this statement."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_there_are_files_to_check() -> None:
    assert {
        Path("ipc/options/config.py"),
        Path("core/scheduling/scheduler.py"),
        Path("tests/house/test_rules.py"),
    } <= set(tracked_files())


def test_init_files_are_empty() -> None:
    """All but the one that users import from."""
    files = [path for path in tracked_files() if path.name == "__init__.py" and (ROOT / path).stat().st_size]
    assert files == [Path("engine_core/__init__.py")]


def test_no_file_is_too_long() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in tracked_files()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_a_function_fits_a_screen() -> None:
    long = {}
    for path, tree in product().items():
        for node in nodes(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long[f"{path}:{node.name}"] = length
    assert long == {}


def test_array_types_and_empty_columns_have_one_file() -> None:
    """ipc/tables/arrays.py, and kernels/arrays.py for the kernels, name them; no other file does."""
    alias = re.compile(r"(?m)^\w+(?:: TypeAlias)? = (?:npt\.)?NDArray\[np\.|^_?[A-Z_]+(?:: \w+)? = np\.zeros\(0,")
    found = {str(path) for path in product() if alias.search((ROOT / path).read_text())}
    assert found == {"ipc/tables/arrays.py", "kernels/arrays.py"}


def test_the_map_is_that_of_the_code() -> None:
    """docs/map.md: `make map` makes it."""
    assert PAGE.read_text() == made()


def test_scheduling_loads_neither_torch_nor_zmq() -> None:
    for module in PURE:
        assert loaded_by(f"import {module}") & {"torch", "zmq", "transformers", "asyncio"} == set(), module


def test_the_public_package_loads_no_engine() -> None:
    assert loaded_by("from engine_core import LLM") & {"torch", "transformers", "core", "kernels"} == set()


def test_the_start_of_the_engine_process_loads_neither_torch_nor_asyncio() -> None:
    assert loaded_by("import core.process.loop, core.__main__") & {"torch", "transformers", "asyncio"} == set()


@pytest.mark.parametrize("module", ["core", "frontend.http"])
def test_processes_load_their_modules_without_garbage_collections(module: str) -> None:
    """There are about a hundred otherwise, a seventh of the start. Without arguments the process ends after it."""
    code = "import gc, os, runpy, sys; gc.callbacks.append(lambda phase, _: os.write(1, phase[:5].encode())); "
    code += f"sys.argv = [{module!r}]; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stdout.count("start") <= 20, done.stdout


def test_an_engine_on_the_cpu_loads_no_triton() -> None:
    assert (
        loaded_by("import core.executors.local")
        & {"triton", "kernels.triton", "core.models.operations.triton_operations"}
        == set()
    )


def test_the_core_is_a_function_of_its_inputs() -> None:
    """No clock, chance, environment, hash() or id() in what the scheduler and the step are made of."""
    loaded = {name for module in PURE for name in loaded_by(f"import {module}") if name.split(".")[0] == "core"}
    files = [Path(*name.split(".")).with_suffix(".py") for name in loaded]
    files = [path for path in files if (ROOT / path).is_file()]
    assert len(files) > 5, files
    found = []
    for path in files:
        tree = product_trees()[path]
        found += [f"{path} imports {name}" for name in imported_modules(tree) if name in IMPURE_MODULES]
        found += [f"{path} calls {name}()" for name in called_names(tree) if name in IMPURE_CALLS]
    # The executor is found by name when the process starts, not during a step.
    assert [one for one in found if not one.startswith("core/execution/executor.py")] == []


def test_nothing_runs_what_it_is_sent() -> None:
    """No pickle, no eval, no trust_remote_code but False, no torch.load of more than weights."""
    found = [f"{path}: {what}" for path, tree in product().items() for what in trusted_input(tree)]
    assert found == []


def test_the_rules_can_fail() -> None:
    tree = ast.parse("import pickle\nfrom time import sleep\nx = eval(hash('a'))\n")
    assert set(imported_modules(tree)) == {"pickle", "time"}
    assert set(called_names(tree)) == {"eval", "hash"}
    assert trusted_input(tree) == ["imports pickle", "calls eval()"]
    assert trusted_input(ast.parse("f(trust_remote_code=flag)")) == ["passes trust_remote_code"]
    assert trusted_input(ast.parse("f(trust_remote_code=False)\ntorch.load(path, weights_only=False)")) == [
        "loads more than weights"
    ]
