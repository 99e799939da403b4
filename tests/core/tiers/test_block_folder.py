"""A folder of KV blocks: what is wrong with a file makes it a miss, and nobody else gets at the blocks."""

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from core.tiers import block_file, block_folder
from core.tiers.block_file import HEAD_BYTES, BlockToLoad, BlockToStore
from core.tiers.block_folder import BlockFolder
from core.tiers.portable_names import KEY_BYTES, PortableNames
from ipc.errors import ConfigError

pytestmark = pytest.mark.timeout(60)
NAME = bytes(range(16))
DATA = bytes(range(1, 61))


def parts(data: bytes = DATA, count: int = 3) -> list[memoryview]:
    size = len(data) // count
    return [memoryview(bytearray(data[size * index : size * (index + 1)])) for index in range(count)]


def store(folder: BlockFolder, name: bytes = NAME) -> bool:
    return folder.store(BlockToStore(name, parts(), folder.key))


def read(folder: BlockFolder, name: bytes = NAME, size: int = len(DATA), count: int = 3) -> bytes | None:
    into = parts(bytes(size), count)
    block = BlockToLoad(name, into, folder.key)
    folder.load(1, [block])
    return b"".join(into) if block.is_loaded else None


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    made = BlockFolder(str(tmp_path / "kv"), 2**30)
    assert store(made)
    return made


def file_of(folder: Path, name: bytes = NAME) -> Path:
    return folder / "kv" / "blocks" / f"{name.hex()}.kv"


def test_a_block_comes_back_also_in_other_parts(folder: BlockFolder) -> None:
    assert folder.has(NAME)
    assert read(folder) == DATA
    assert read(folder, count=1) == DATA
    assert not folder.has(bytes(16))
    assert read(folder, bytes(16)) is None


def test_many_blocks_are_read_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, readv, met, readers = BlockFolder(str(tmp_path / "kv"), 2**30), os.readv, threading.Barrier(2), set[int]()
    names = [name_of(number) for number in range(16)]
    assert all(store(made, name) for name in names)
    file_of(tmp_path, names[5]).write_bytes(b"damaged")

    def read_together(fd: int, buffers: list[memoryview]) -> int:
        if (reader := threading.get_ident()) not in readers:
            readers.add(reader)
            met.wait(60)  # for the other one
        return readv(fd, buffers)

    monkeypatch.setattr(os, "readv", read_together)
    monkeypatch.setattr(block_folder, "usable_cpus", lambda: 2)
    blocks = [BlockToLoad(name, parts(bytes(len(DATA))), made.key) for name in names]
    made.load(1, blocks)
    assert [block.is_loaded for block in blocks] == [name != names[5] for name in names]
    assert len(readers) == 2


def test_fewer_threads_read_if_the_system_starts_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, start, started = BlockFolder(str(tmp_path / "kv"), 2**30), threading.Thread.start, list[threading.Thread]()
    names = [name_of(number) for number in range(32)]
    assert all(store(made, name) for name in names)

    def start_one(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    monkeypatch.setattr(block_folder, "usable_cpus", lambda: 4)
    blocks = [BlockToLoad(name, parts(bytes(len(DATA))), made.key) for name in names]
    made.load(1, blocks)
    assert all(block.is_loaded for block in blocks)
    assert (len(started), started[0].is_alive()) == (2, False)


def test_it_is_there_after_a_restart(folder: BlockFolder, tmp_path: Path) -> None:
    key = folder.key
    folder.close()
    again = BlockFolder(str(tmp_path / "kv"), 2**30)
    assert again.key == key
    assert len(key) == KEY_BYTES
    assert read(again) == DATA


def test_every_byte_flipped_is_a_miss(folder: BlockFolder, tmp_path: Path) -> None:
    whole = file_of(tmp_path).read_bytes()
    assert len(whole) == HEAD_BYTES + len(DATA)
    for index in range(len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= 0xFF
        file_of(tmp_path).write_bytes(damaged)
        assert read(folder) is None, index
        assert not file_of(tmp_path).exists(), "a damaged file goes"
        assert store(folder)


def test_every_length_but_the_right_one_is_a_miss(folder: BlockFolder, tmp_path: Path) -> None:
    whole = file_of(tmp_path).read_bytes()
    for size in (*range(len(whole)), len(whole) + 1):
        file_of(tmp_path).write_bytes((whole + b"x")[:size])
        assert read(folder) is None, size
        assert store(folder)
    assert read(folder) == DATA


def test_a_file_under_another_name_is_a_miss(folder: BlockFolder, tmp_path: Path) -> None:
    other = bytes(reversed(NAME))
    os.rename(file_of(tmp_path), file_of(tmp_path, other))
    assert read(folder, other) is None


def test_a_block_of_another_size_is_a_miss(folder: BlockFolder) -> None:
    assert read(folder, size=30) is None


def test_a_file_that_is_cut_while_it_is_read(
    folder: BlockFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readv = os.readv

    def cut(fd: int, buffers: list[memoryview]) -> int:
        os.truncate(file_of(tmp_path), HEAD_BYTES + 5)
        return readv(fd, buffers)

    monkeypatch.setattr(os, "readv", cut)
    assert read(folder) is None


def test_short_reads_and_writes_go_on(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    readv, writev, other = os.readv, os.writev, bytes(16)
    monkeypatch.setattr(os, "readv", lambda fd, buffers: readv(fd, [buffers[0][:7]]))
    monkeypatch.setattr(os, "writev", lambda fd, buffers: writev(fd, [memoryview(buffers[0])[:7]]))
    assert store(folder, other)
    assert read(folder, other) == DATA


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_what_is_no_file_of_ours_is_a_miss(folder: BlockFolder, tmp_path: Path, make: Callable[[Path], None]) -> None:
    file_of(tmp_path).unlink()
    make(file_of(tmp_path))
    assert read(folder) is None
    assert not folder.has(NAME)


def test_a_file_that_others_may_read_is_a_miss(folder: BlockFolder, tmp_path: Path) -> None:
    file_of(tmp_path).chmod(0o640)
    assert read(folder) is None
    assert not folder.has(NAME)


def test_all_is_the_owners_alone(folder: BlockFolder, tmp_path: Path) -> None:
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


def test_links_files_and_open_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="it is a link or not a folder"):
        BlockFolder(str(tmp_path / "link"), 2**30)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a link or not a folder"):
        BlockFolder(str(tmp_path / "file"), 2**30)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    with pytest.raises(ConfigError, match="accessible to others"):
        BlockFolder(str(tmp_path / "open"), 2**30)
    (tmp_path / "real" / "blocks").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="it is a link or not a folder"):
        BlockFolder(str(tmp_path / "real"), 2**30)
    with pytest.raises(ConfigError, match="it is a link or not a folder"):
        BlockFolder(str(tmp_path / "file" / "kv"), 2**30)


def test_missing_parents_are_made_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "engine" / "kv"
    for _ in range(2):
        BlockFolder(f"{path}/", 2**30).close()
    for made in (path, *path.parents[:2]):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        BlockFolder(str(tmp_path / "kv"), 2**30)


def test_a_damaged_key_is_refused(folder: BlockFolder, tmp_path: Path) -> None:
    (tmp_path / "kv" / "key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="remove the folder"):
        BlockFolder(str(tmp_path / "kv"), 2**30)


def test_engines_that_open_a_folder_together_have_one_key(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: keys.append(BlockFolder(str(tmp_path / "kv"), 2**30).key)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def age(folder: Path, number: int, seconds: int) -> None:
    path = file_of(folder, name_of(number))
    os.utime(path, (0, path.stat().st_mtime - seconds))


def test_the_oldest_go_when_the_bound_is_reached(tmp_path: Path) -> None:
    size = HEAD_BYTES + len(DATA)
    folder = BlockFolder(str(tmp_path / "kv"), 20 * size)
    for number in range(20):
        store(folder, name_of(number))
        age(tmp_path, number, 1000 - number)
    assert read(folder, name_of(0)) == DATA, "it is in use"
    store(folder, name_of(20))
    left = [number for number in range(21) if folder.has(name_of(number))]
    assert left == [0, *range(4, 21)], "of 21 blocks those stay that leave a sixteenth of the bound free"


def test_blocks_of_other_engines_count(tmp_path: Path) -> None:
    size = HEAD_BYTES + len(DATA)
    one, other = (BlockFolder(str(tmp_path / "kv"), 32 * size) for _ in range(2))
    for number in range(200):
        store((one, other)[number % 2], name_of(number))
    held = sum(path.stat().st_size for path in (tmp_path / "kv" / "blocks").iterdir())
    assert held <= 32 * size * 18 // 16, "each engine may be a sixteenth above the bound"


def test_unfinished_files_go_when_they_are_old(folder: BlockFolder, tmp_path: Path) -> None:
    blocks = tmp_path / "kv" / "blocks"
    old, new = blocks / "1-1-aa.tmp", blocks / "1-2-bb.tmp"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    folder.make_room()
    assert not old.exists()
    assert new.exists()
    assert folder.has(NAME)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_behind(
    folder: BlockFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(fd: int, name: bytes, parts: list[memoryview], key: bytes) -> None:
        os.write(fd, b"half")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(block_file, "write_block", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        store(folder, bytes(16))
    assert [path.name for path in (tmp_path / "kv" / "blocks").iterdir()] == [file_of(tmp_path).name]


def test_a_block_larger_than_the_bound_is_not_written(tmp_path: Path) -> None:
    folder = BlockFolder(str(tmp_path / "kv"), 50)
    assert not store(folder)
    assert not folder.has(NAME)


def test_a_block_that_is_there_is_not_written_again(folder: BlockFolder, tmp_path: Path) -> None:
    os.utime(file_of(tmp_path), (0, 0))
    assert not store(folder)
    assert file_of(tmp_path).stat().st_mtime > 0, "but counts as used"


def test_names_depend_on_all_that_the_bytes_depend_on() -> None:
    import numpy as np

    tokens = np.arange(8, dtype=np.int32)

    def last(key: bytes = bytes(32), content: str = "model", size: int = 4, root: int = -1, first: int = 0) -> bytes:
        ids = tokens.copy()
        ids[0] = first
        return list(PortableNames(key, content, size).chain(root, ids))[-1]

    names = [last(), last(key=bytes(31) + b"x"), last(content="other"), last(size=8), last(root=-2), last(first=9)]
    assert len(set(names)) == len(names)
    assert last() == last()
    one = PortableNames(bytes(32), "model", 4)
    first, second = one.chain(-1, tokens)
    assert one.after(one.root(-1), tokens[:4]) == first
    assert one.after(first, tokens[4:]) == second


def test_what_is_to_be_kept_goes_after_everything_else(tmp_path: Path) -> None:
    """A folder for three blocks: later ones are removed, until the kept one is let go. A restart changes nothing."""
    size = HEAD_BYTES + len(DATA)
    names = [bytes([number]) * 16 for number in range(8)]
    made = BlockFolder(str(tmp_path / "kv"), 3 * size)
    made.retain(names[:1], 60_000)  # it has no file yet
    assert store(made, names[0])
    assert store(made, names[1])
    made.retain(names[1:2], 30_000)
    for name in names[2:5]:
        assert store(made, name)
        assert not store(made, names[0])  # a use does not make it due earlier
    assert read(made, names[0]) == DATA
    made.close()
    again = BlockFolder(str(tmp_path / "kv"), 3 * size)
    assert store(again, names[5])
    assert [again.has(name) for name in names[:5]] == [True, True, False, False, False]
    again.retain(names[:1], 0)
    for name in names[6:]:
        assert store(again, name)
    assert not again.has(names[0])
    assert again.has(names[1])
    again.close()
