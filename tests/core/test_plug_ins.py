"""Plug-in executors: found by their names in real distributions' metadata, and refused with the reason."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.execution.executor import EXECUTOR_API
from core.executors.by_name import import_executor, load_executor
from core.executors.fake import FakeExecutor
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from ipc.options.devices import DEVICES, EXECUTORS
from ipc.options.given_options import config_from_options
from tests.placed import PREFIX, placed

Install = Callable[..., None]

GOOD = """
from core.executors.fake import FakeExecutor
EXECUTOR_API = (1, 0)
create = FakeExecutor
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with one module and its entry points, as an installer lays them out."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = set(sys.modules)

    def make(distribution: str, source: str, devices: tuple[str, ...] = (), **entries: str) -> None:
        (tmp_path / f"{distribution}_module.py").write_text(placed(source))
        info = tmp_path / f"{distribution}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        lines = [f"{name} = {module or f'{distribution}_module'}" for name, module in entries.items()]
        lines += [f"[{DEVICES}]", *[f"{device} = {distribution}_module" for device in devices]]
        (info / "entry_points.txt").write_text("\n".join([f"[{EXECUTORS}]", *lines, ""]))
        importlib.invalidate_caches()

    yield make
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_a_plug_in_is_created_with_the_config(install: Install) -> None:
    install("ascend", GOOD, npu="")
    executor = load_executor(EngineConfig(executor="npu", executor_options={"a": "b"}, model="its own"))
    assert isinstance(executor, FakeExecutor)
    assert executor.info.name == "its own"


def test_only_what_is_named_is_imported(install: Install) -> None:
    install("ascend", GOOD, npu="")
    install("broken", "raise RuntimeError('imported')", other="")
    import_executor(EngineConfig(executor="npu"))
    assert "broken_module" not in sys.modules
    with pytest.raises(RuntimeError, match="imported"):
        import_executor(EngineConfig(executor="other"))


def test_a_built_in_name_stays_ours(install: Install) -> None:
    install("thief", GOOD, fake="")
    assert import_executor(EngineConfig(executor="fake")).__name__ == f"{PREFIX}core.executors.fake"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nup", "there is no executor 'nup'; available: local, fake, npu; did you mean npu?"),
        ("quantum", f"available: local, fake, npu; a plug-in registers its executor in the group {EXECUTORS}"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_there_are(install: Install, name: str, text: str) -> None:
    install("ascend", GOOD, npu="")
    with pytest.raises(ConfigError) as caught:
        import_executor(EngineConfig(executor=name))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (GOOD.replace("(1, 0)", "(2, 0)"), r"is written for EXECUTOR_API \(2, 0\), but this engine supports \(1, 0\)$"),
        (GOOD.replace("(1, 0)", f"(1, {EXECUTOR_API[1] + 1})"), "is written for EXECUTOR_API"),
        (GOOD.replace("EXECUTOR_API", "OTHER"), "is written for EXECUTOR_API None"),
        ("EXECUTOR_API = (1, 0)", r"executor 'npu' \(ascend_module, of ascend 1.5\) has no create\(config\)"),
        ("import not_installed_anywhere", "cannot be imported: No module named 'not_installed_anywhere'"),
    ],
)
def test_a_plug_in_that_does_not_fit_is_refused(install: Install, source: str, text: str) -> None:
    install("ascend", source, npu="")
    with pytest.raises(ConfigError, match=text):
        import_executor(EngineConfig(executor="npu"))


def test_two_distributions_with_one_name_are_refused(install: Install) -> None:
    install("ascend", GOOD, npu="")
    install("descend", GOOD, npu="")
    with pytest.raises(
        ConfigError, match=r"by ascend 1.5 \(ascend_module\) and descend 1.5 \(descend_module\): uninstall"
    ):
        import_executor(EngineConfig(executor="npu"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"executor": ""}, "executor must be 'local', 'fake' or the name of a plug-in; got ''"),
        ({"executor": "a" * 129}, "the name of a plug-in"),
        ({"executor": "a\n"}, "the name of a plug-in"),
        ({"executor_options": {"a": "b"}}, "executor_options are for 'fake' and plug-ins; 'local' has none: a"),
        ({"executor": "npu", "executor_options": {"a": 1}}, "executor_options must be a dict of texts"),
    ],
)
def test_names_and_options_are_checked_with_the_config(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**options)  # type: ignore[arg-type]


def test_a_device_chooses_the_executor_that_declares_it(install: Install) -> None:
    install("ascend", GOOD, devices=("npu",), ascend="")
    config = config_from_options(device="npu")
    assert (config.executor, config.device) == ("ascend", "npu")
    assert isinstance(load_executor(config), FakeExecutor)
    with pytest.raises(ConfigError, match="device must be one of cpu, cuda, npu; got 'tpu'"):
        config_from_options(device="tpu")


def test_a_device_that_several_executors_declare(install: Install) -> None:
    install("ascend", GOOD, devices=("npu",), ascend="")
    install("other", GOOD, devices=("npu",), other="")
    with pytest.raises(ConfigError, match="device='npu' is declared by several executors"):
        config_from_options(device="npu")
    assert config_from_options(device="npu", executor="other").executor == "other"


def test_a_device_of_a_module_that_is_no_executor(install: Install) -> None:
    install("ascend", GOOD, devices=("npu",))
    with pytest.raises(ConfigError, match="device='npu' names ascend_module, which no entry of"):
        config_from_options(device="npu")
