"""The wheel's kernels where the compiler knows only some of the instructions."""

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

from build_wheel.hook import WANTED, WheelHook
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


def compiled(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> list[str]:
    """The variants that a wheel of a machine with three gets."""
    monkeypatch.setattr(cpu_build, "variants_of_machine", lambda: ["amx", "avx2", "portable"])
    monkeypatch.setattr(cpu_build, "build", lambda variant, *_: variant.encode())
    with tempfile.TemporaryDirectory() as folder:
        hook: Any = SimpleNamespace(
            _load=lambda path: cpu_build,
            _folder=SimpleNamespace(name=folder),
            app=SimpleNamespace(display_warning=said.append),
        )
        libraries = WheelHook._compile_kernels(hook)
    return [name.split("-")[0] for name in libraries]
