"""The wheel works where nothing of the checkout is in reach: installed into a fresh environment, run from elsewhere."""

import os
import re
import signal
import subprocess
import tempfile
import zipfile
from pathlib import Path

import pytest

from build_wheel.imports import PACKAGES
from ipc.version import VERSION
from kernels.cpu.build import usable_variants
from tests.build_wheel.suite import ROOT, build, environment, moved, site_packages, suite_command, write_suite
from tests.fake_tokens import fake_tokens

pytestmark = [pytest.mark.checkout, pytest.mark.timeout(400)]  # the wheel's kernels are compiled

#: Tests with engine processes, of the fake executor and of the demo model.
END_TO_END = (
    "tests/core/process/test_start.py",
    "tests/frontend/test_async_llm.py",
    "tests/frontend/test_model_files_end_to_end.py",
)


def run(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def sources() -> dict[str, bytes]:
    """What a wheel has of the checkout: the files that git knows or would add, where they are in a wheel."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "engine_core", *PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = [name for name in listed if (ROOT / name).exists()]
    found = {}
    for name in names:
        path = ROOT / name
        content = moved(path).encode() if name.endswith(".py") else path.read_bytes()
        found[name if name.startswith("engine_core/") else f"engine_core/{name}"] = content
    return found


def test_the_wheel_is_one_package_with_all_sources_and_the_licence(wheel: Path) -> None:
    files = contents(wheel)
    information = f"llm_engine_core-{VERSION}.dist-info"
    assert {name.split("/")[0] for name in files} == {"engine_core", information}
    assert {Path(name).name for name in files if "/licenses/" in name} == {
        *("LICENSE", "NOTICE", "LICENSE.marked", "LICENSE.dompurify")
    }
    package = {name: content for name, content in files.items() if name.startswith("engine_core/")}
    assert {name: content for name, content in package.items() if "/prebuilt/" not in name} == sources()
    assert "engine-core = engine_core.__main__:main" in files[f"{information}/entry_points.txt"].decode()


def test_the_wheel_requires_no_torch(wheel: Path) -> None:
    metadata = contents(wheel)[f"llm_engine_core-{VERSION}.dist-info/METADATA"].decode().splitlines()
    required = [line for line in metadata if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert any("numpy" in line for line in required)
    assert not any(name in line for line in required for name in ("torch", "triton", "transformers"))
    for extra in ("torch", "transformers", "cuda"):
        assert f"Requires-Dist: torch>=2.11; extra == '{extra}'" in metadata


def test_site_packages_gets_one_package(installed: Path) -> None:
    found = {path.name for path in site_packages(installed).iterdir()}
    assert found - {"dependencies.pth"} == {"engine_core", f"llm_engine_core-{VERSION}.dist-info"}


def test_the_wheel_brings_the_kernels_compiled(installed: Path, wheel: Path, tmp_path: Path) -> None:
    code = "from engine_core.kernels.cpu.library import load_cpu_library; print(load_cpu_library().variant)"
    done = subprocess.run(
        [str(installed / "python"), "-c", code],
        cwd=tmp_path,
        env={**environment(), "CC": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == usable_variants()[:1], done.stderr
    assert not (tmp_path / "none").exists()


def test_the_tag_names_the_oldest_glibc_that_will_do(wheel: Path) -> None:
    """The version names are looked for in the libraries' bytes, whatever these mean."""
    libraries = [content for name, content in contents(wheel).items() if name.endswith(".so")]
    needed = max(int(minor) for library in libraries for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library))
    platform = f"linux_{os.uname().machine}"
    assert wheel.name == f"llm_engine_core-{VERSION}-py3-none-many{platform.replace('_', f'_2_{needed}_', 1)}.whl"


def test_without_a_compiler_the_wheel_from_the_sdist_is_the_same_but_pure(wheel: Path, tmp_path: Path) -> None:
    """`python -m build` makes the wheel out of the source distribution."""
    assert "no compiled kernels" in build(tmp_path, CC="no-such-compiler")
    (pure,) = tmp_path.glob("*.whl")
    assert pure.name == f"llm_engine_core-{VERSION}-py3-none-any.whl"

    def comparable(path: Path) -> dict[str, bytes]:
        return {
            name: content
            for name, content in contents(path).items()
            if Path(name).name not in ("RECORD", "WHEEL") and "/prebuilt/" not in name
        }

    assert comparable(pure) == comparable(wheel)
    assert not [name for name in contents(pure) if name.endswith(".so")]
    assert "engine_core/kernels/cpu/c/products/gemm.c" in contents(pure)  # built where a compiler is found later


def test_help_and_version_from_another_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "engine-core", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    done = run(installed / "python", "-m", "engine_core", "--version", cwd=tmp_path)
    assert done.stdout == f"engine-core {VERSION}\n"
    where = "import engine_core; print(engine_core.__version__, engine_core.__file__)"
    version, path = run(installed / "python", "-c", where, cwd=tmp_path).stdout.split()
    assert version == VERSION
    assert path.startswith(str(installed.parent)), "the checkout is in reach, so nothing is proved"


def test_the_package_is_imported_without_what_is_in_it(installed: Path, tmp_path: Path) -> None:
    """The package is imported before each of its modules, in the engine process too."""
    code = "import sys, engine_core; print(*sorted(name for name in sys.modules if name.startswith('engine_core')))"
    done = run(installed / "python", "-c", code, cwd=tmp_path)
    assert done.stdout.split() == ["engine_core", "engine_core.ipc", "engine_core.ipc.version"]


def test_serve_and_generate_run_from_another_folder(installed: Path, tmp_path: Path) -> None:
    program = str(installed / "engine-core")
    server = subprocess.Popen(
        [program, "serve", "--executor", "fake", "--listen", "tcp://127.0.0.1:0"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        ready = server.stdout.readline().split()
        assert ready[:3] == ["engine-core:", "ready", "at"], ready
        done = run(
            Path(program), "generate", "--connect", ready[3], "--max-tokens", "5", "--json", "11 12 13", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        tokens = ",".join(map(str, fake_tokens([11, 12, 13], 5, 32_000)))
        assert f'"token_ids":[{tokens}]' in done.stdout
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        server.stdout.close()


def test_the_end_to_end_tests_pass_against_the_wheel(installed: Path, tmp_path: Path) -> None:
    """All tests do: `make test-wheel`."""
    write_suite(tmp_path, *END_TO_END)
    with tempfile.TemporaryDirectory(prefix="w-") as base:  # short: socket paths have a limit of 107 bytes
        command = suite_command(installed, "--basetemp", base, "-p", "no:cacheprovider", *END_TO_END)
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
