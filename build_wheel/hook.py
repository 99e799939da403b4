"""Hatchling's build hook: it moves all packages of the checkout into `engine_core` and adds compiled C kernels.

With kernels, the wheel is for this platform only. It has every variant of its architecture, or those that
ENGINE_CORE_WHEEL_VARIANTS names (avx512,portable). ENGINE_CORE_WHEEL_MACHINE=aarch64 with a cross compiler as CC makes
one for that architecture. Without a C compiler the wheel is pure Python; then kernels are built on the machine that
installs it, or torch's are used. A compiler that is there and fails ends the build, because installers hide warnings;
with ENGINE_CORE_WHEEL_PURE=1 the wheel has the variants that were built. An editable install uses the checkout
unchanged.
"""

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WANTED = "ENGINE_CORE_WHEEL_VARIANTS"
PURE = "ENGINE_CORE_WHEEL_PURE"
MACHINE = "ENGINE_CORE_WHEEL_MACHINE"  # for a cross compiler: as of platform.machine()


class WheelHook(BuildHookInterface[Any]):
    """The hook that hatchling loads from this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the moved packages and the kernels to a wheel. version: "standard" or "editable"."""
        if version == "editable":
            return
        imports, platform_tag = self._load("build_wheel/imports.py"), self._load("build_wheel/platform_tag.py")
        self._folder = tempfile.TemporaryDirectory(prefix="engine-core-wheel-")
        home = Path(self._folder.name, imports.HOME)
        imports.copy_moved(Path(self.root, imports.HOME), home)
        for name in imports.PACKAGES:
            imports.copy_moved(Path(self.root, name), home / name)
        build_data["force_include"][str(home)] = imports.HOME
        libraries = self.compile_kernels()
        for name, content in libraries.items():
            path = home / "kernels" / "cpu" / "prebuilt" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        if libraries:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag.platform_tag(libraries.values(), os.environ.get(MACHINE))}"

    def compile_kernels(self) -> dict[str, bytes]:
        """Return file name -> content of each variant's library; empty where there is no compiler.

        Errors: RuntimeError for a compiler that fails, unless PURE is 1.
        """
        cpu_build = self._load("kernels/cpu/build.py")
        libraries: dict[str, bytes] = {}
        try:
            compiler = cpu_build.find_compiler()
        except cpu_build.CannotCompileError as error:
            self.app.display_warning(f"the wheel has no compiled kernels: {error}")
            return libraries
        except cpu_build.CpuLibraryError as error:
            self.fail("compiled kernels", error)
            return libraries
        machine = os.environ.get(MACHINE)
        for variant in _wanted(cpu_build.variants_of(machine)):
            try:
                cpu_build.check_instructions(variant, compiler)
                folder, limits = Path(self._folder.name), (cpu_build.WHEEL_BUILD_S, cpu_build.WHEEL_CPU_S)
                built = cpu_build.build(variant, compiler, folder, *limits)
                name = f"{variant}-{cpu_build.source_hash(variant, machine=machine)}.so"
                libraries[name] = cpu_build.with_digest(built)
            except cpu_build.CannotCompileError as error:
                self.app.display_warning(f"the wheel has no kernels {variant}: {error}")
            except cpu_build.CpuLibraryError as error:
                self.fail(f"kernels {variant}", error)
        return libraries

    def fail(self, what: str, error: Exception) -> None:
        """Say that the wheel has none of these. Errors: RuntimeError, unless PURE is 1."""
        if os.environ.get(PURE) != "1":
            raise RuntimeError(f"the C compiler fails; {PURE}=1 makes a wheel without {what}: {error}") from error
        self.app.display_warning(f"the wheel has no {what}: {error}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the temporary folder."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _load(self, path: str) -> Any:
        """Return a module of the checkout by its path: a build's environment has none of the project's packages."""
        spec = importlib.util.spec_from_file_location(Path(path).stem, Path(self.root, path))
        assert spec is not None, path
        assert spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _wanted(variants: list[str]) -> list[str]:
    """Return the variants that the environment asks for, best first; all where it names none.

    Errors: ValueError for names of other variants.
    """
    names = os.environ.get(WANTED, "").replace(",", " ").split()
    if unknown := set(names) - set(variants):
        raise ValueError(f"{WANTED}: {', '.join(sorted(unknown))}; there are {', '.join(variants)}")
    return [variant for variant in variants if variant in names] if names else variants
