"""The form of matrices in memory: what each value of `quantization` chooses, and that tokens stay what they are."""

import mmap
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest

from core.executors.local import usual_dtype
from core.model_files.loading import load_model
from core.model_files.model_config import read_model_config
from core.models.llama import Llama
from core.models.operations.cpu_operations import CpuOperations
from core.models.operations.second_forms import SecondForms
from core.models.operations.stored_matrix import StoredMatrix, StoredPart
from core.models.operations.weight_form import WeightForm, best_form
from ipc.errors import ConfigError
from ipc.options.config import EngineConfig
from kernels.arrays import UInt8s
from kernels.cpu.gemm import PackedMatrix
from kernels.cpu.library import load_cpu_library
from kernels.cpu.packed_weights import QUANTIZED, WHOLE, PackedWeights
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from kernels.memory.weight_memory import Room, WeightMemory
from tests.core.runner.invariance import KINDS, difference, random_weights, run
from tests.core.runner.invariance_scenarios import PROMPT
from tests.core.runner.test_invariance_quantized import quantized_weights
from tests.placed import PREFIX
from tools.lab.bench.tiny_model import write_tiny_model


@pytest.mark.parametrize(
    ("variant", "num_threads", "form"),
    [
        ("avx512bf16", 1, WeightForm.DENSE),
        ("avx512bf16", 2, WeightForm.BOTH),
        ("avx512bf16", 3, WeightForm.STORED),
        ("avx512", 1, WeightForm.STORED),
        ("avx2", 2, WeightForm.DENSE),
        ("avx2", 3, WeightForm.STORED),
    ],
)
def test_the_best_form_is_known_by_the_kernels_and_threads(variant: str, num_threads: int, form: WeightForm) -> None:
    assert best_form(variant, num_threads, KINDS["plain"].num_matrix_weights) is form


@pytest.mark.parametrize(
    ("bytes_per_weight", "form"), [(7, WeightForm.STORED), (8, WeightForm.DENSE), (12, WeightForm.BOTH)]
)
def test_what_would_fill_the_memory_stays_as_stored(
    bytes_per_weight: int, form: WeightForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        f"{PREFIX}core.models.operations.weight_form.usable_memory_bytes", lambda: 1000 * bytes_per_weight
    )
    assert best_form("avx512bf16", 2, 1000) is form


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_what_pools_has_one_form(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It rarely multiplies few rows."""
    write_tiny_model(tmp_path)
    asked = list[bool]()

    def choose(*_: Any, has_few_rows: bool) -> WeightForm:
        asked.append(has_few_rows)
        return WeightForm.STORED

    monkeypatch.setattr(f"{PREFIX}core.model_files.loading.best_form", choose)
    load_model(tmp_path, BFLOAT16, EngineConfig(model=str(tmp_path), runner=runner, threads=1))
    assert asked == [runner == "generate"]


@pytest.mark.parametrize(
    ("flags", "bytes_per_weight", "dtype"),
    [
        ("sse4_2", 16, FLOAT32),
        ("sse4_2", 15, BFLOAT16),
        ("avx2 fma", 16, BFLOAT16),
        ("avx512f avx512_bf16", 16, BFLOAT16),
    ],
)
def test_the_dtype_is_bfloat16_where_that_is_fast_or_float32_too_large(
    flags: str, bytes_per_weight: int, dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path)
    weights = read_model_config(tmp_path).num_matrix_weights
    monkeypatch.setattr(
        f"{PREFIX}core.models.operations.weight_form.usable_memory_bytes", lambda: weights * bytes_per_weight
    )
    monkeypatch.setattr(Path, "read_text", lambda path, *_: f"flags : fpu {flags}\n")
    assert usual_dtype(tmp_path) == dtype
    if flags == "sse4_2":  # the projector counts where memory does
        with pytest.raises(ConfigError, match="mmproj is for models in"):
            usual_dtype(tmp_path, "mmproj.gguf")


def has_second(product: PackedMatrix) -> bool:
    return product.second is not None and bool(product.second.arguments.weights)


@pytest.mark.parametrize("kind", ["plain", "experts", "latent attention"])
def test_dequantized_at_load_the_bits_are_those_as_stored(kind: str) -> None:
    library = load_cpu_library()
    forms = {
        form: Llama(KINDS[kind], quantized_weights(kind).items(), BFLOAT16, library=library, form=form)
        for form in (WeightForm.STORED, WeightForm.DENSE, WeightForm.BOTH)
    }
    outs = [cast(PackedMatrix, model.layers[0].products["o"]) for model in forms.values()]
    assert [out.packing == QUANTIZED for out in outs] == [True, False, True]
    assert [has_second(out) for out in outs] == [False, False, True]
    expected = forms.pop(WeightForm.STORED)
    for model in forms.values():
        assert difference(run(model, PROMPT), run(expected, PROMPT)) == ""
        assert model.variant == expected.variant


@pytest.mark.parametrize("kind", ["plain", "experts", "latent attention"])
def test_forms_that_come_later_change_no_bit(kind: str) -> None:
    """Steps have the same bits before they are packed, before they are taken up, and afterwards."""
    library = load_cpu_library()

    def made(later: SecondForms | None) -> Llama:
        weights, options = quantized_weights(kind), {"library": library, "form": WeightForm.BOTH}
        return Llama(KINDS[kind], weights.items(), BFLOAT16, second_forms=later, **cast(Any, options))

    library.memory.keep(True)
    expected = made(None)
    size = cast(CpuOperations, expected.operations).num_packed_bytes
    with library.memory.together(size) as room:
        later = SecondForms(room, size)
        model = made(later)
    own, out = cast(CpuOperations, model.operations), cast(PackedMatrix, model.layers[0].products["o"])
    bits, num_forms = run(expected, PROMPT), 1
    assert difference(run(model, PROMPT), bits) == ""
    assert own.num_packed_bytes == size, "an estimate"
    while later.pack_next():
        later.take_up()
        num_forms += 1
    assert num_forms >= 4
    assert not has_second(out)
    assert own.num_packed_bytes == size
    assert difference(run(model, PROMPT), bits) == ""
    later.take_up()
    assert has_second(out)
    assert difference(run(model, PROMPT), bits) == ""
    assert not later.pack_next()
    library.memory.keep(False)


def test_forms_that_are_dropped_leave_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that happens while one is packed."""
    memory = WeightMemory()
    memory.keep(True)
    with memory.together(1 << 20) as room:
        later = SecondForms(room, 1 << 20)
    del room

    def pack(*, room: Room | None) -> PackedWeights:
        packed = PackedWeights(memory.allocate(64, room), 1, 1, BFLOAT16, WHOLE)
        later.drop()
        return packed

    forms = [later.add(pack) for _ in range(3)]
    mappings = list[int]()
    monkeypatch.setattr(mmap, "mmap", lambda _, size, **options: mappings.append(size))
    assert not later.pack_next()
    assert not later.pack_next()
    later.take_up()
    assert not any(form.arguments.weights for form in forms)
    with memory.together(1 << 20):
        assert not mappings, "it is that of the forms"


def test_what_cannot_be_packed_leaves_one_form() -> None:
    later, zeros = SecondForms(), np.zeros(64, np.uint8)

    def pack(*, room: Room | None) -> PackedWeights:
        if len(packed) == 1:
            raise MemoryError
        packed.append(PackedWeights(zeros, 1, 1, BFLOAT16, WHOLE))
        return packed[0]

    packed = list[PackedWeights]()
    forms = [later.add(pack) for _ in range(3)]
    assert later.pack_next()
    with pytest.raises(MemoryError):
        later.pack_next()
    assert not later.pack_next()
    later.take_up()
    assert [bool(form.arguments.weights) for form in forms] == [True, False, False]


def test_a_matrix_that_cannot_stay_as_stored_takes_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed for nothing would stay as long as the weights."""
    library, sizes = load_cpu_library(), list[int]()
    allocate = library.memory.allocate

    def counted(num_bytes: int, room: Room | None = None) -> UInt8s:
        sizes.append(num_bytes)
        return allocate(num_bytes, room)

    monkeypatch.setattr(library.memory, "allocate", counted)
    numbers = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    types = "Q4_0", "Q8_0"  # in a gated product each panel has columns of both
    parts = [StoredPart(name, gguf.quantize(numbers, gguf.GGMLQuantizationType[name]), 32) for name in types]
    operations = CpuOperations(KINDS["plain"], BFLOAT16, library, WeightForm.BOTH)
    product, _ = operations.gate_up(StoredMatrix(parts), "silu")
    assert len(sizes) == 1
    assert operations.num_packed_bytes == sizes[0]
    assert product.packing != QUANTIZED
    assert product.second is None


def test_plain_matrices_have_one_form() -> None:
    library = load_cpu_library()
    weights = random_weights(KINDS["plain"], BFLOAT16)
    model = Llama(KINDS["plain"], weights.items(), BFLOAT16, library=library, form=WeightForm.BOTH)
    assert cast(PackedMatrix, model.layers[0].products["down"]).second is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quantization": "stored", "cpu_kernels": "torch"}, "'stored' needs the C kernels"),
        ({"quantization": "int8", "numerics": "L0"}, "'int8' needs the C kernels"),
        ({"quantization": "stored", "model_impl": "transformers"}, "'stored' does not fit .*transformers"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=text):
        load_model(tmp_path, BFLOAT16, EngineConfig(model=str(tmp_path), threads=1, **options))


def test_the_option_reaches_the_operations(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    for value, form in (("none", WeightForm.DENSE), ("stored", WeightForm.STORED)):
        config = EngineConfig(model=str(tmp_path), threads=1, quantization=cast(Any, value))
        model = load_model(tmp_path, BFLOAT16, config).model
        assert isinstance(model, Llama)
        assert isinstance(model.operations, CpuOperations)
        assert model.operations.form is form
