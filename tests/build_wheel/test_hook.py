"""The wheel's kernels where the compiler knows only some of the instructions."""

import tempfile
from types import SimpleNamespace
from typing import Any

import pytest

from build_wheel.hook import WheelHook
from kernels.cpu import build as cpu_build

pytestmark = pytest.mark.checkout


def test_a_variant_that_the_compiler_does_not_know_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def check_instructions(variant: str, compiler: cpu_build.Compiler) -> None:
        if variant == "amx":
            raise cpu_build.CannotCompileError("cc does not know tdpbf16ps")

    monkeypatch.setattr(cpu_build, "variants_of_machine", lambda: ["amx", "avx2", "portable"])
    monkeypatch.setattr(cpu_build, "check_instructions", check_instructions)
    monkeypatch.setattr(cpu_build, "build", lambda variant, *_: variant.encode())
    with tempfile.TemporaryDirectory() as folder:
        hook: Any = SimpleNamespace(
            _load=lambda path: cpu_build,
            _folder=SimpleNamespace(name=folder),
            app=SimpleNamespace(display_warning=said.append),
        )
        libraries = WheelHook._compile_kernels(hook)
    assert [name.split("-")[0] for name in libraries] == ["avx2", "portable"]
    assert said == ["the wheel has no kernels amx: cc does not know tdpbf16ps"]
