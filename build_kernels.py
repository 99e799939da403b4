"""Hatchling's hook: puts the C kernels, compiled, into a wheel, which then is one for this kind of machine. Without a
C compiler the wheel is pure Python, and kernels are built where it is installed, or torch's are used."""

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """version: "standard" or "editable"; the latter runs from the sources, and builds when it first needs to."""
        if version == "editable":
            return
        cpu_build = _load(Path(self.root, "kernels", "cpu", "build.py"))
        self._folder = tempfile.TemporaryDirectory(prefix="engine-core-kernels-")
        folder = Path(self._folder.name)
        try:
            compiler = cpu_build.find_compiler()
            for variant in cpu_build.variants_of_machine():
                name = f"{variant}-{cpu_build.source_hash(variant)}.so"
                (folder / name).write_bytes(cpu_build.with_digest(cpu_build.build(variant, compiler, folder)))
                build_data["force_include"][str(folder / name)] = f"kernels/cpu/prebuilt/{name}"
        except cpu_build.CpuLibraryError as error:
            self.app.display_warning(f"the wheel has no compiled kernels: {error}")
            build_data["force_include"].clear()
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _load(path: Path) -> Any:
    """A build has its own environment, in which nothing of ours is installed."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
