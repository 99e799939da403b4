"""The wheel works where nothing of the checkout is in reach: installed into a fresh environment, run from elsewhere."""

import os
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from kernels.cpu.build import usable_variants
from tests.fake_tokens import fake_tokens

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fresh environment's folder of programs. Our dependencies are those of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True, cwd=folder)
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    ).stdout.strip()
    # A path line is taken as it stands: the .pth files over there, our own editable install's too, are not read.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_wheel_holds_the_packages_and_the_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"core", "frontend", "ipc", "kernels", "tools", "engine_core.py"} == {
        top for top in tops if not top.endswith(".dist-info")
    }
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}


def test_the_wheel_brings_the_kernels_compiled(installed: Path, wheel: Path, tmp_path: Path) -> None:
    assert wheel.name.startswith("engine_core-")
    assert "-py3-none-linux_" in wheel.name
    code = "from kernels.cpu.library import load_cpu_library; print(load_cpu_library().variant)"
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


def test_a_wheel_builds_without_a_compiler(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    environment_ = {**os.environ, "CC": "no-such-compiler"}
    built = subprocess.run(command, env=environment_, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "no compiled kernels" in built.stdout + built.stderr
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(path).namelist()
    assert "kernels/cpu/gemm.c" in names  # built where a compiler is found later
    assert not [name for name in names if name.endswith(".so")]


def test_help_runs_from_another_folder(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "engine-core", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    where = "import engine_core; print(engine_core.__file__)"
    found = run(installed / "python", "-c", where, cwd=tmp_path).stdout
    assert found.startswith(str(installed.parent)), "the checkout is in reach, so nothing is proved"


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
