"""Packed weights in a file: the same bits as packing them, and packed again if anything is wrong with the file."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.executors.load import load
from core.executors.local import LocalExecutor
from core.model_files import weight_cache
from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.model_files.weight_cache import Packed, WeightCache
from core.models.llama import Llama
from core.models.operations.weight_form import WeightForm
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from kernels.cpu.library import load_cpu_library
from kernels.cpu.library_file import private_folder
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from kernels.memory import huge_pages
from tests.core.draft_heads import LLAMA, model_shapes, random_weights, write
from tests.core.executors.test_draft_head import config_of, run
from tests.core.models.checkpoints import build
from tests.core.models.operations.test_stored_matrix import CONFIG, write_mixed
from tests.core.models.test_llama import Requests, prompts

LIBRARY = load_cpu_library()
MANY = 1 << 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the files. Files of any size are kept."""
    monkeypatch.setattr(weight_cache, "_LEAST_BYTES", 0)
    monkeypatch.setattr(weight_cache, "private_folder", lambda name: tmp_path / name)
    (tmp_path / "weights").mkdir(mode=0o700)
    return tmp_path / "weights"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(weight_cache.log, "say", lines.append)
    return lines


def packed(seed: int, size: int = 1000) -> Packed:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8), (seed, -1)


def never() -> Packed:
    pytest.fail("packed again")


def fill(key: str = "model", max_bytes: int = MANY) -> WeightCache:
    """Pack two matrices, and wait until they are kept."""
    cache = WeightCache([key], LIBRARY, max_bytes)
    for seed in (1, 2):
        cache.take(f"matrix {seed}", lambda seed=seed: packed(seed, 999 * seed))  # type: ignore[misc]
    keep(cache)
    return cache


def keep(cache: WeightCache) -> None:
    if (thread := cache.keep()) is not None:
        thread.join()


def test_what_was_packed_is_mapped(folder: Path) -> None:
    fill()
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    cache = WeightCache(["model"], LIBRARY, MANY)
    for seed in (2, 1):
        data, facts = cache.take(f"matrix {seed}", never)
        assert np.array_equal(data, packed(seed, 999 * seed)[0])
        assert facts == (seed, -1)
        assert data.ctypes.data % 64 == 0
        assert not data.flags.writeable
    assert cache.keep() is None
    assert WeightCache(["other"], LIBRARY, MANY).take("matrix 1", lambda: packed(7))[1] == (7, -1)


def test_a_matrix_more_is_packed_and_kept_with_the_others(folder: Path) -> None:
    fill()
    cache = WeightCache(["model"], LIBRARY, MANY)
    cache.take("matrix 1", never)
    assert cache.take("matrix 3", lambda: packed(3))[1] == (3, -1)
    keep(cache)
    cache = WeightCache(["model"], LIBRARY, MANY)
    for name in ("matrix 1", "matrix 3"):
        cache.take(name, never)


@pytest.mark.parametrize("is_huge", [True, False])
def test_a_file_that_is_not_in_huge_pages_is_moved_there(
    is_huge: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrices fill more than one of the pieces in which a file is written."""
    large = {name: packed(seed, 17 << 20) for seed, name in enumerate("abc")}
    usual, looked, moved = os.getpriority(os.PRIO_PROCESS, 0), list[int](), list[tuple[int, int]]()

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def look(_: object) -> bool:
        looked.append(priority())
        return is_huge or bool(moved)

    def move(_: int, num_bytes: int) -> bool:
        moved.append((priority(), num_bytes))
        return True

    for _ in range(2):
        cache = WeightCache(["model"], LIBRARY, MANY)
        taken = {name: cache.take(name, lambda name=name: large[name])[0] for name in large}  # type: ignore[misc]
        for module in (weight_cache, huge_pages):
            monkeypatch.setattr(module, "is_in_huge_pages", look)
        monkeypatch.setattr(huge_pages, "_replace", move)
        keep(cache)
    assert looked == [usual] * (1 if is_huge else 2)  # a thread without a share of the CPUs would hold Python's lock
    assert [one for one, _ in moved] == ([] if is_huge else [usual, *[19] * (len(moved) - 1)])
    assert (sum(size for _, size in moved) > 48 << 20) is not is_huge
    for name, data in taken.items():
        assert np.array_equal(data, large[name][0])


def change(at: int) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(3), "does not begin as"),
        (change(17), "its header is damaged"),
        (change(100), "its header is damaged"),
        (change(60), "its data is damaged"),
        (change(-1), "its data is damaged"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "its end is missing"),
        (lambda file: os.truncate(file, 20), "its header is damaged"),
        (lambda file: os.truncate(file, 0), "cannot mmap an empty file"),
        (lambda file: file.chmod(0o660), "not a file that only this user may write"),
    ],
)
def test_a_damaged_file_is_packed_again(
    damage: Callable[[Path], None], message: str, folder: Path, said: list[str]
) -> None:
    fill()
    (file,) = folder.iterdir()
    damage(file)
    cache = WeightCache(["model"], LIBRARY, MANY)
    assert message in said.pop()
    assert list(folder.iterdir()) == []
    assert cache.take("matrix 1", lambda: packed(8))[1] == (8, -1)
    keep(cache)
    assert WeightCache(["model"], LIBRARY, MANY).take("matrix 1", never)[1] == (8, -1)
    assert said == []


def test_the_least_recently_used_files_are_removed(folder: Path, said: list[str]) -> None:
    fill("a")
    (first,) = folder.iterdir()
    size = first.stat().st_size
    fill("b", 3 * size)
    (second,) = set(folder.iterdir()) - {first}
    os.utime(first, ns=(1, 1))
    os.utime(second, ns=(2, 2))
    WeightCache(["a"], LIBRARY, MANY)  # uses it
    fill("c", 2 * size)
    assert first in folder.iterdir()
    assert second not in folder.iterdir()
    fill("d", size // 3)  # fewer than its own bytes: not kept
    assert len(list(folder.iterdir())) == 2
    assert said == []


def test_what_cannot_be_written_is_said_and_leaves_nothing(
    folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        fill()
    assert "the packed weights are not kept: [Errno 28]" in said.pop()
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1,) * 10))
    fill()
    assert "has less than twice their" in said.pop()
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(weight_cache, "private_folder", private_folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    private_folder("weights").chmod(0o750)
    cache = WeightCache(["model"], LIBRARY, MANY)
    assert "packed weights are not kept" in said.pop()
    assert cache.take("matrix 1", lambda: packed(1))[1] == (1, -1)
    assert cache.keep() is None


def test_one_engine_writes_a_file(folder: Path, said: list[str]) -> None:
    fill()
    (file,) = folder.iterdir()
    file.unlink()
    with open(file.with_suffix(".tmp"), "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        fill()
        assert list(folder.iterdir()) == [file.with_suffix(".tmp")]
        fill("another model")  # does not remove it
        (other_file,) = set(folder.iterdir()) - {file.with_suffix(".tmp")}
    fill()  # over what an engine left that was killed
    assert set(folder.iterdir()) == {file, other_file}
    assert said == []


def test_what_killed_engines_left_is_removed(folder: Path, said: list[str]) -> None:
    """Of any model: the file of one that is never started again would stay for ever."""
    left = folder / f"{'0' * 64}.tmp"
    left.write_bytes(bytes(1000))
    fill()
    (file,) = folder.iterdir()
    assert file != left
    assert said == []


def logits_of(model: Llama) -> bytes:
    return bytes(Requests(model, prompts(9, vocab_size=40)).step({0: 9})[0].numpy().tobytes())


def write_safetensors(case: str) -> Callable[[Path], Any]:
    def write(path: Path) -> Any:
        build(case).save_pretrained(path)
        return read_model_config(path)

    return write


def write_gguf(path: Path) -> Any:
    write_mixed(path)
    return CONFIG


@pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
@pytest.mark.parametrize(
    ("write", "dtype", "form"),
    [
        (write_gguf, BFLOAT16, WeightForm.STORED),
        (write_gguf, BFLOAT16, WeightForm.DENSE),
        (write_gguf, FLOAT32, WeightForm.INT8),
        (write_safetensors("qwen3-moe"), BFLOAT16, WeightForm.STORED),
        (write_safetensors("glm4.5-air"), FLOAT32, WeightForm.DENSE),
        (write_safetensors("minicpm3"), BFLOAT16, WeightForm.INT8),
    ],
)
def test_a_model_from_its_file_has_the_same_bits(
    write: Callable[[Path], Any], dtype: Dtype, form: WeightForm, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / ("model.gguf" if write is write_gguf else "model")
    config, found = write(path), []
    for number in range(3):
        cache = WeightCache(["model"], LIBRARY, MANY)
        take = cache.take if number else None  # the first one without a cache
        weights = load_weights(path, config, dtype, LIBRARY)
        found.append(logits_of(Llama(config, weights, dtype, library=LIBRARY, form=form, take_packed=take)))
        thread = cache.keep()
        assert (thread is not None) == (number == 1)
        if thread is not None:
            thread.join()
    assert found[1] == found[2] == found[0]


def wait_until_kept() -> None:
    for thread in threading.enumerate():
        if thread.name == "weight-cache":
            thread.join()


def is_mapped(file: Path) -> bool:
    return str(file) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("sleeps", [True, False])
def test_a_file_is_mapped_until_its_weights_are_dropped(
    sleeps: bool, moves: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sleep(2), or by an update. The executor still has the model's object, and that the cache's. moves: a thread is
    moving the weights into huge pages, and has moved the first piece.
    """
    begun, is_over = threading.Event(), threading.Event()

    def move(array: object, before_the_rest: object) -> None:
        begun.set()
        assert is_over.wait(60)

    if moves:
        monkeypatch.setattr(weight_cache, "is_in_huge_pages", lambda _: False)
        monkeypatch.setattr(weight_cache, "move_to_huge_pages", move)
    settings = {**LLAMA, "intermediate_size": 8192}  # more than a huge page
    model = write(tmp_path / "model", settings, random_weights(model_shapes(settings), 1))
    config = config_of(model, None)
    tokens = run(config)[0]
    wait_until_kept()
    (file,) = folder.iterdir()
    assert not is_mapped(file)

    class Changed(LocalExecutor):
        def initialize_cache(self, config: ResolvedConfig) -> None:
            super().initialize_cache(config)
            if moves:
                assert begun.wait(60)
            else:
                wait_until_kept()
            assert is_mapped(file)
            if sleeps:
                self.sleep(2)
                assert not is_mapped(file)
            self.use_weights(self.prepare_weights(model, 1))
            if sleeps:
                self.wake_up()
            assert not is_mapped(file)
            is_over.set()

    try:
        assert run(config, make=Changed)[0] == tokens
    finally:
        is_over.set()
        wait_until_kept()


def test_a_gguf_file_is_known_by_another_name(folder: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "link.gguf").symlink_to("model.gguf")
    for name in ("model.gguf", "link.gguf"):
        cache = WeightCache(["model"], LIBRARY, MANY)
        weights = load_weights(tmp_path / name, CONFIG, BFLOAT16, LIBRARY)
        Llama(CONFIG, weights, BFLOAT16, library=LIBRARY, form=WeightForm.STORED, take_packed=cache.take)
        thread = cache.keep()
        assert (thread is not None) == (name == "model.gguf"), name
        if thread is not None:
            thread.join()


def test_a_file_is_checked_piece_by_piece_after_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "_MAPPED", 2 << 20)
    mapped, mmap = list[int](), weight_cache.mmap.mmap

    def map_piece(fd: int, size: int, **given: Any) -> object:
        mapped.append(size)
        return mmap(fd, size, **given)

    with monkeypatch.context() as patch:
        patch.setattr(weight_cache.mmap, "mmap", map_piece)
        cache = WeightCache(["model"], LIBRARY, MANY)
        cache.take("matrix", lambda: packed(1, (5 << 20) + 7))
        keep(cache)
    assert mapped == [2 << 20, 2 << 20, (1 << 20) + 7]
    assert np.array_equal(WeightCache(["model"], LIBRARY, MANY).take("matrix", never)[0], packed(1, (5 << 20) + 7)[0])


def test_a_file_is_written_from_one_piece_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places, write = list[int](), os.pwrite
    size = (9 << 20) + 7  # so that the second matrix begins after a gap, in the second piece

    def watched(fd: int, data: Any, at: int) -> int:
        if isinstance(data, memoryview):  # otherwise it is the header
            places.append(np.frombuffer(data, np.uint8).ctypes.data)
        return write(fd, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(weight_cache.os, "pwrite", watched)
        cache = WeightCache(["model"], LIBRARY, MANY)
        for number in (1, 2):
            cache.take(f"matrix {number}", lambda number=number: packed(number, size))
        keep(cache)
    assert len(places) == 3
    assert len({*places}) == 1
    (path,) = folder.glob("*.weights")
    assert path.read_bytes()[-size - 57 : -size] == bytes(57), "nothing of an earlier piece is left in the gap"
    cache = WeightCache(["model"], LIBRARY, MANY)
    assert all(np.array_equal(cache.take(f"matrix {one}", never)[0], packed(one, size)[0]) for one in (1, 2))


def test_dtypes_and_changed_files_have_their_own(folder: Path, tmp_path: Path) -> None:
    build("llama2").save_pretrained(tmp_path / "model")

    def num_files(dtype: Dtype = FLOAT32, **options: Any) -> int:
        load(EngineConfig(model=str(tmp_path / "model"), threads=1, **options), lambda *_: dtype)
        wait_until_kept()
        return len(list(folder.iterdir()))

    assert num_files(weight_cache_bytes=0) == 0
    assert num_files(load_format="dummy") == 0
    assert num_files() == 1
    assert num_files() == 1
    assert num_files(BFLOAT16) == 2
    weights = tmp_path / "model" / "model.safetensors"
    os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    assert num_files() == 3
