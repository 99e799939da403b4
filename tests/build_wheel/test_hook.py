"""The wheel's kernels where the compiler knows only some of the instructions."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from build_wheel.hook import PURE, WANTED, WheelHook
from kernels.cpu import build as cpu_build

pytestmark = pytest.mark.checkout


def test_a_variant_that_the_compiler_does_not_know_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def check_instructions(variant: str, compiler: cpu_build.Compiler) -> None:
        if variant == "amx":
            raise cpu_build.CannotCompileError("cc does not know tdpbf16ps")

    monkeypatch.setattr(cpu_build, "check_instructions", check_instructions)
    assert compiled(monkeypatch, said) == ["avx2", "portable"]
    assert said == ["the wheel has no kernels amx: cc does not know tdpbf16ps"]


def test_the_environment_names_the_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_build, "check_instructions", lambda variant, compiler: None)
    assert compiled(monkeypatch, []) == ["amx", "avx2", "portable"]
    monkeypatch.setenv(WANTED, "portable, amx")
    assert compiled(monkeypatch, []) == ["amx", "portable"]
    monkeypatch.setenv(WANTED, "portable,avx3")
    with pytest.raises(ValueError, match=r"^ENGINE_CORE_WHEEL_VARIANTS: avx3; there are amx, avx2, portable$"):
        compiled(monkeypatch, [])


def test_a_compiler_that_fails_ends_the_build_or_leaves_out_its_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the others: pip shows no warnings, so a wheel without kernels would look like any other."""

    def failing(variant: str, *_: Any) -> bytes:
        if variant == "avx2":
            raise cpu_build.CpuLibraryError("cc failed: killed")
        return variant.encode()

    said: list[str] = []
    monkeypatch.setattr(cpu_build, "check_instructions", lambda variant, compiler: None)
    with pytest.raises(RuntimeError, match="ENGINE_CORE_WHEEL_PURE=1 makes a wheel without kernels avx2: cc failed"):
        compiled(monkeypatch, said, failing)
    monkeypatch.setenv(PURE, "1")
    assert compiled(monkeypatch, said, failing) == ["amx", "portable"]
    assert said == ["the wheel has no kernels avx2: cc failed: killed"]


def test_no_compiler_is_no_failure_and_a_broken_one_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiled(monkeypatch, said) == []
    assert "the wheel has no compiled kernels: no C compiler" in said[0]
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(RuntimeError, match=r"without compiled kernels: the C compiler .*broken-cc fails"):
        compiled(monkeypatch, said)


def test_the_limit_is_of_cpu_time(tmp_path: Path) -> None:
    """A compiler that waits is not stopped by it, and one that computes is."""
    compiler = tmp_path / "slow-cc"
    compiler.write_text('#!/bin/sh\ncase " $* " in *" -shared "*) $SLOW ;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CC", str(compiler))
        patched.setattr(cpu_build, "SOURCE_FOLDER", tmp_path)
        (tmp_path / "a.c").write_text("int f(void) { return 1; }\n")
        found = cpu_build.find_compiler()
        patched.setenv("SLOW", "sleep 1.5")
        assert cpu_build.build("portable", found, tmp_path, 60.0, 1)
        patched.setenv("SLOW", "eval while :; do :; done")
        with pytest.raises(cpu_build.CpuLibraryError, match="does not link: its status is -"):
            cpu_build.build("portable", found, tmp_path, 60.0, 1)


def compiled(
    monkeypatch: pytest.MonkeyPatch, said: list[str], build: Callable[..., bytes] = lambda variant, *_: variant.encode()
) -> list[str]:
    """The variants that a wheel of a machine with three gets."""
    monkeypatch.setattr(cpu_build, "variants_of", lambda machine: ["amx", "avx2", "portable"])
    monkeypatch.setattr(cpu_build, "build", build)
    with tempfile.TemporaryDirectory() as folder:
        hook: Any = SimpleNamespace(
            _load=lambda path: cpu_build,
            _folder=SimpleNamespace(name=folder),
            app=SimpleNamespace(display_warning=said.append),
        )
        hook.fail = partial(WheelHook.fail, hook)
        libraries = WheelHook.compile_kernels(hook)
    return [name.split("-")[0] for name in libraries]
