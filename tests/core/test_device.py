"""The choice of kernels: by the config and by what the machine has, and what is reported of it."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

import core.device
from core.device import start_cpu_kernels, start_torch
from core.executors.local import LocalExecutor
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.model_options import CpuKernels
from kernels.cpu import library_file as cpu_library_file
from kernels.cpu.build import VARIANTS, has_amx, runnable_variants
from tools.lab.bench.tiny_model import write_tiny_model


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines that the engine says meanwhile."""
    lines: list[str] = []
    monkeypatch.setattr(core.device.log, "say", lines.append)
    before = torch.get_num_threads()
    yield lines
    torch.set_num_threads(before)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(cpu_library_file, "PREBUILT_FOLDER", tmp_path)


def test_c_kernels_need_no_torch(said: list[str]) -> None:
    library = start_cpu_kernels(EngineConfig(threads=2))
    assert library is not None
    library.stop_threads()
    assert said == []


@pytest.mark.parametrize("variant", runnable_variants())
def test_a_variant_is_had_by_its_name(variant: CpuKernels, said: list[str]) -> None:
    library = start_cpu_kernels(EngineConfig(cpu_kernels=variant, threads=1))
    assert library is not None
    assert library.variant == variant
    is_emulated = variant == "amx" and not has_amx()
    assert library.emulates_amx == is_emulated
    assert ["has no AMX" in line for line in said] == [True] * is_emulated


def test_every_variant_has_a_name_in_the_options() -> None:
    assert set(get_args(CpuKernels)) == {"auto", "c", "torch", *VARIANTS}


def test_a_variant_that_this_cpu_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library_file, "runnable_variants", lambda: ["avx2", "portable"])
    with pytest.raises(
        ConfigError, match=r"cpu_kernels=amx is not available here: .* kernels avx2, portable, but not 'amx'"
    ):
        start_cpu_kernels(EngineConfig(cpu_kernels="amx"))


def test_torch_is_torch() -> None:
    assert start_cpu_kernels(EngineConfig(cpu_kernels="torch")) is None
    for threads in (2, 1):
        start_torch(EngineConfig(threads=threads))
        assert torch.get_num_threads() == threads


def without_torch(name: str) -> object:
    return None if name == "torch" else importlib.util.find_spec(name)


@pytest.mark.usefixtures("no_compiler")
def test_with_neither_the_error_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.device, "find_spec", without_torch)
    with pytest.raises(
        ConfigError,
        match=r"C kernels are not available: no C compiler.*pip install torch, or engine-core with its extra \[torch\]",
    ):
        start_cpu_kernels(EngineConfig())


def test_torch_that_is_asked_for_and_missing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(core.device, "find_spec", without_torch)
    write_tiny_model(tmp_path)
    for options in ({"cpu_kernels": "torch"}, {"numerics": "L0"}, {"model_impl": "transformers"}):
        with pytest.raises(
            ConfigError,
            match=r"needs torch, .*not installed: pip install torch, or engine-core with its extra \[torch\]",
        ):
            LocalExecutor(EngineConfig(model=str(tmp_path), threads=1, **options))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_serves_and_one_line_says_why(said: list[str]) -> None:
    assert start_cpu_kernels(EngineConfig()) is None
    (line,) = said
    assert line.startswith(
        "engine-core: without C kernels the engine is slower and has numerics level L0: "
        "no C compiler: no-such-compiler does not run"
    )
    assert "\n" not in line


def test_with_a_compiler_that_hangs_torch_serves_and_one_line_says_why(
    said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "hanging-cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) ;; *) exec sleep 600 ;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_library_file, "PREBUILT_FOLDER", tmp_path)
    monkeypatch.setattr(cpu_library_file, "BUILD_S", 0.2)
    assert start_cpu_kernels(EngineConfig()) is None
    (line,) = said
    assert line.startswith(
        "engine-core: without C kernels the engine is slower and has numerics level L0: "
        f"{compiler} did not finish within 0 s"
    )
    assert "\n" not in line


@pytest.mark.usefixtures("no_compiler")
def test_c_kernels_that_are_demanded_and_missing_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cpu_kernels=c is not available here: no C compiler.*cpu_kernels=torch"):
        start_cpu_kernels(EngineConfig(cpu_kernels="c"))


@pytest.mark.usefixtures("no_compiler")
def test_a_model_loads_without_a_compiler(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    executor = LocalExecutor(EngineConfig(model=str(tmp_path / "tiny"), threads=1))
    assert executor.info.numerics == "L0", "level L2 is the C kernels' promise"


def test_whose_kernels_run_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    c, torch_s, auto = (
        LocalExecutor(EngineConfig(model=str(tmp_path), threads=1, cpu_kernels=kernels)).info.fingerprint
        for kernels in ("c", "torch", "auto")
    )
    assert c == auto != torch_s
