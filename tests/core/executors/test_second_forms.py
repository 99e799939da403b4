"""Second forms of matrices, which are packed after an update: no token depends on when, and each update has its own."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import gguf
import msgspec
import pytest

from core.executors.load import load_drafting_model
from core.executors.local import LocalExecutor
from core.model_files.model_config import read_model_config
from core.model_files.tensors.tensor_names import gguf_name
from core.models.llama import Llama
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.second_forms import SecondForms
from core.models.operations.weight_form import WeightForm
from ipc.errors import ModelFileError
from ipc.options.resolved import ResolvedConfig
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import CpuLibrary
from tests.core.draft_heads import LLAMA, MIMO, model_shapes, random_weights, write
from tests.core.executors.test_draft_head import config_of, run
from tests.placed import PREFIX

MODEL = {**LLAMA, "num_hidden_layers": 2}
NUM_FORMS = 4 * 2 + 1  # of two layers and the head


@pytest.fixture(name="form", autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[WeightForm]:
    """The form that suits the machine; by default, both."""
    form = [WeightForm.BOTH]
    monkeypatch.setattr(f"{PREFIX}kernels.memory.weight_memory._CHUNK_BYTES", 1 << 20)  # the model is small
    monkeypatch.setattr(f"{PREFIX}core.model_files.loading.best_form", lambda *_, **options: form[-1])
    return form


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The model, and two files of other weights for it, which are quantized."""
    folder = tmp_path_factory.mktemp("models")
    model = write(folder / "model", MODEL, random_weights(model_shapes(MODEL), 0))
    return [model, *(quantized(folder / f"{which}.gguf", Path(model), which) for which in (1, 2))]


def quantized(path: Path, model: Path, which: int) -> str:
    writer, config = gguf.GGUFWriter(path, "llama"), read_model_config(model)
    for name, numbers in random_weights(model_shapes(MODEL), which).items():
        if numbers.ndim == 1:
            writer.add_tensor(gguf_name(name, config), numbers)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0 if "lm_head" in name else gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(gguf_name(name, config), gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


class Updated(LocalExecutor):
    """Packs a form before each of some steps after an update."""

    packs_from, num_steps = 10**9, 0
    path = ""

    def initialize_cache(self, config: ResolvedConfig) -> None:
        super().initialize_cache(config)
        self.update(self.path, 1)

    def update(self, path: str, version: int) -> None:
        self.use_weights(self.prepare_weights(path, version))

    def execute(self, plan: Any) -> Any:
        self.num_steps += 1
        if self.num_steps >= self.packs_from:
            self.pack_second_form()
        return super().execute(plan)

    @property
    def forms(self) -> tuple[bool, ...]:
        """Whether the first layer's matrices have second forms."""
        products = [cast(PackedMatrix, each) for each in self.model.layers[0].products.values()]
        return tuple(each.second is not None and bool(each.second.arguments.weights) for each in products)

    @property
    def model(self) -> Llama:
        return cast(Llama, self.runner.model)

    @property
    def operations(self) -> CpuOperations:
        return cast(CpuOperations, self.model.operations)


def config_for(model: str, **options: Any) -> ResolvedConfig:
    return msgspec.structs.replace(config_of(model, None), dtype="bfloat16", **options)


def updated(files: list[str], from_step: int = 10**9) -> Updated:
    """Return an executor whose model gets other weights before the first step."""
    executor = Updated(config_for(files[0]))
    executor.path, executor.packs_from = files[1], from_step
    return executor


def given(executor: Updated, _: ResolvedConfig) -> Updated:
    return executor


def test_when_they_come_no_token_changes(files: list[str], form: list[WeightForm]) -> None:
    """Steps of few rows and of many run before they are packed, while they are, and with them."""
    answers = []
    for from_step in (10**9, 1, 12):
        executor = updated(files, from_step)
        answers.append(run(config_for(files[0]), make=partial(given, executor))[0])
        assert executor.num_steps > 12 + NUM_FORMS
        assert set(executor.forms) == {from_step < 10**9}
    form.append(WeightForm.DENSE)
    answers.append(run(config_for(files[0]), make=partial(given, updated(files)))[0])
    assert answers[1:] == answers[:1] * 3


def started(files: list[str], num_packed: int) -> Updated:
    """Return an executor with weights of an update, and so many of their forms."""
    executor, config = updated(files), config_for(files[0])
    executor.initialize_cache(config)
    assert [executor.pack_second_form() for _ in range(num_packed)] == [n + 1 < NUM_FORMS for n in range(num_packed)]
    return executor


def take_up(executor: Updated) -> None:
    while executor.pack_second_form():
        pass
    cast(SecondForms, executor.operations.second_forms).take_up()


def test_an_update_that_fails_leaves_them_to_be_packed(files: list[str]) -> None:
    executor = started(files, 3)
    with pytest.raises(ModelFileError):
        executor.prepare_weights("/nowhere.gguf", 2)
    take_up(executor)
    assert all(executor.forms)


def test_those_of_earlier_weights_are_dropped(files: list[str]) -> None:
    """An update may come at any time. Its own forms follow, and the memory of each next one has the same size."""
    executor = started(files, NUM_FORMS)
    size = executor.operations.num_packed_bytes
    executor.update(files[2], 2)
    assert executor.pack_second_form()
    mark = executor.prepare_weights(files[1], 3)
    assert executor.pack_second_form(), "the earlier weights are still in use"
    assert executor.operations.num_packed_bytes == size
    executor.use_weights(mark)
    cast(SecondForms, executor.operations.second_forms).take_up()
    assert not any(executor.forms)
    assert executor.operations.num_packed_bytes == size
    take_up(executor)
    assert all(executor.forms)
    assert executor.operations.num_packed_bytes == size
    plain = executor.prepare_weights(files[0], 4)
    executor.use_weights(plain)
    assert not executor.pack_second_form()
    assert executor.operations.num_packed_bytes < size


def test_an_engine_that_sleeps_packs_nothing(files: list[str]) -> None:
    executor = started(files, 3)
    executor.sleep(1)
    assert not executor.pack_second_form()
    executor.wake_up()
    assert executor.pack_second_form(), "it has weights"
    size = executor.operations.num_packed_bytes
    executor.sleep(2)
    assert not executor.pack_second_form()
    assert executor.operations.num_packed_bytes == size, "the next weights' memory is as large"
    executor.update(files[2], 2)
    executor.wake_up()
    take_up(executor)
    assert all(executor.forms)


def test_an_engine_that_was_not_updated_packs_nothing(files: list[str]) -> None:
    executor = Updated(config_for(files[0]))
    assert not executor.pack_second_form()


def test_a_draft_head_is_packed_next_to_steps_as_its_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two threads would use the kernels' threads at the same time."""
    model, depth = write(tmp_path, MIMO, random_weights(model_shapes(MIMO), 0)), [0]
    beside, load = CpuLibrary.beside_steps, load_drafting_model
    found = list[int]()

    @contextlib.contextmanager
    def counted(library: CpuLibrary) -> Iterator[None]:
        with beside(library):
            depth[0] += 1
            yield
            depth[0] -= 1

    def loading(*given: Any, **options: Any) -> Any:
        found.append(depth[0])
        return load(*given, **options)

    monkeypatch.setattr(CpuLibrary, "beside_steps", counted)
    monkeypatch.setattr(f"{PREFIX}core.executors.local.load_drafting_model", loading)
    executor = Updated(config_of(model, "mtp"))
    executor.path = model
    executor.initialize_cache(config_of(model, "mtp"))
    assert found == [0, 1]
