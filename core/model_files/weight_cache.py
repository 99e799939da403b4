"""WeightCache: a model's packed weights in a file, which the next start maps instead of packing them again.

The files are in $XDG_CACHE_HOME/engine-core/weights (by default ~/.cache/...). Only its owner may access the folder.
A file's name is a digest of all that its bytes depend on: the model's files, the kernels, the code that packs, the form
of the weights, and the part of the model. It holds no addresses, so engines of one model share its memory if the system
keeps files in huge pages (Linux 6.x on ext4, XFS or btrfs). Otherwise an engine copies it into huge pages, in which
products read it faster, in a thread next to its first requests.

A file is (little-endian): 16 bytes _MAGIC; the header's length in 8 bytes; the SHA-256 of the header; digest_of() all
data; the header, a msgpack map of names to entries; and from the next multiple of _PAGE on, the data. Whatever is
wrong with a file, the weights are packed again.
"""

import contextlib
import fcntl
import hashlib
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

import core.models
import kernels
from core import log
from ipc.tables.arrays import UInt8s
from ipc.tables.rounding import round_up
from kernels.cpu.build import CpuLibraryError
from kernels.cpu.library import CpuLibrary
from kernels.cpu.library_file import private_folder
from kernels.cpu.packed_weights import digest_of, digest_of_pieces
from kernels.memory.huge_pages import is_in_huge_pages, move_to_huge_pages

_MAGIC = b"packed weights 1"
_DIGEST_BYTES, _HEADER_AT = 32, len(_MAGIC) + 8 + 2 * 32
_MAX_HEADER_BYTES = 64 << 20
_ALIGNMENT, _PAGE = 64, 1 << 21  # of an entry, for the kernels; of the data: a huge page
#: Weights that are packed faster than a file is found are not kept.
_LEAST_BYTES = 32 << 20
_PIECE = 8 << 20  # bytes written at a time
_MAPPED = 8 << 20  # bytes read at a time after that, a multiple of _PAGE and of SUM_BYTES
_SUFFIX, _UNFINISHED = ".weights", ".tmp"
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14

#: Facts about packed bytes, which the cache stores next to them.
Facts = tuple[int, ...]
Packed = tuple[UInt8s, Facts]


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    begin: int  # in the data
    end: int
    facts: Facts


class WeightCache:
    """The packed weights of one model, from its file if there is one.

    It is used by one thread, until keep(). max_bytes: of all files in the folder; the least recently used ones are
    removed.
    """

    def __init__(self, key: Iterable[str], library: CpuLibrary, max_bytes: int) -> None:
        """key: all that the bytes depend on, in addition to library and code."""
        text = "\n".join([_MAGIC.decode(), library.file_name, _code_digest(), *key])
        self._library, self._max_bytes = library, max_bytes
        self._made: dict[str, Packed] = {}  # in the order in which they were asked for
        self._entries: dict[str, _Entry] = {}
        self._data: UInt8s | None = None  # where the entries are
        self._misses = 0
        self._path: Path | None = None
        try:
            self._path = private_folder("weights") / f"{hashlib.sha256(text.encode()).hexdigest()}{_SUFFIX}"
        except CpuLibraryError as error:
            log.say(f"engine-core: packed weights are not kept: {error}")
            return
        opened = _open(self._path, library)
        if opened is not None:
            self._entries, self._data = opened

    def take(self, name: str, make: Callable[[], Packed]) -> Packed:
        """Return the packed bytes of this name: from the file, or those that `make` returns.

        Bytes from the file are read-only, at a multiple of 64 bytes.
        """
        entry = self._entries.get(name)
        if entry is not None and self._data is not None:
            packed = self._data[entry.begin : entry.end], entry.facts
        else:
            self._misses += 1
            packed = make()
        self._made[name] = packed
        return packed

    def keep(self) -> threading.Thread | None:
        """Once the model is loaded, write its file in a thread, unless it has one. Return the thread.

        If it has one, the thread moves the weights into huge pages, unless they are there, as long as they are used.
        From now on only the arrays that take() has returned keep the file mapped: the model's operations refer to this
        object for as long as the engine runs, and sleep(2) or other weights must free the memory.
        """
        made, data = self._made, self._data
        self._made, self._entries, self._data = {}, {}, None
        if self._path is None or not made:
            return None
        work = partial(_keep, self._path, made, self._library, self._max_bytes)
        if not self._misses and data is not None:
            if data.nbytes < _PAGE:
                return None
            work = partial(_move, weakref.ref(data))
        thread = threading.Thread(target=work, name="weight-cache", daemon=True)
        thread.start()
        return thread


def _code_digest() -> str:
    """Return a digest of the code that decides what packed bytes are made of a model's files."""
    digest, (kernels_folder,), (models,) = hashlib.sha256(), kernels.__path__, core.models.__path__
    folders = Path(__file__).parent / "tensors", Path(models, "operations"), Path(models, "parts")
    files = [path for folder in folders for path in folder.glob("*.py")]
    files += [path for folder in (Path(kernels_folder), Path(kernels_folder, "cpu")) for path in folder.glob("*.py")]
    for path in sorted(files):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _open(path: Path, library: CpuLibrary) -> tuple[dict[str, _Entry], UInt8s] | None:
    """Map a file and check it. None: there is none, or it is damaged; then it is removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with open(fd, "rb") as file:
            found = _read(file.fileno(), library)
            os.utime(file.fileno())  # the least recently used file is removed first
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        log.say(f"engine-core: {path} cannot be used, so the weights are packed again: {error}")
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    return found


def _read(fd: int, library: CpuLibrary) -> tuple[dict[str, _Entry], UInt8s]:
    """Errors: OSError, ValueError if the file is not as it was written."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ValueError("it is not a file that only this user may write")
    mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    if mapping[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it does not begin as a file of packed weights")
    size = int.from_bytes(mapping[len(_MAGIC) : len(_MAGIC) + 8], "little")
    digests = mapping[len(_MAGIC) + 8 : _HEADER_AT]
    header = mapping[_HEADER_AT : _HEADER_AT + min(size, _MAX_HEADER_BYTES)]
    if len(header) != size or hashlib.sha256(header).digest() != digests[:_DIGEST_BYTES]:
        raise ValueError("its header is damaged")
    entries = msgspec.msgpack.decode(header, type=dict[str, _Entry])
    begin = round_up(_HEADER_AT + size, _PAGE)
    if len(mapping) != begin + max((entry.end for entry in entries.values()), default=0):
        raise ValueError("its end is missing")
    for advice in (mmap.MADV_HUGEPAGE, _POPULATE_READ):  # what must be read comes in huge pages, if the system can
        with contextlib.suppress(OSError):  # an older kernel; the pages come one by one then
            mapping.madvise(advice)
    data = np.frombuffer(mapping, np.uint8, offset=begin)  # all entries refer to this array, which _move() relies on
    if digest_of(library, data) != digests[_DIGEST_BYTES:]:
        raise ValueError("its data is damaged")
    data.flags.writeable = False
    return entries, data


def _come_last() -> None:
    """Give this thread the least share of the CPUs: requests come first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _move(data: weakref.ref[UInt8s]) -> None:
    """Move mapped weights into huge pages, after requests, until they are dropped.

    Looks at the pages are brief and hold Python's lock, for which all threads would wait if this one had no core.
    """
    if not _is_moved(data()):
        move_to_huge_pages(data, _come_last)


def _is_moved(data: UInt8s | None) -> bool:
    return data is None or is_in_huge_pages(data)


def _keep(path: Path, made: dict[str, Packed], library: CpuLibrary, max_bytes: int) -> None:
    """Write the file, and remove others if there are too many bytes. Say why if it cannot be written."""
    _come_last()
    entries, end = dict[str, _Entry](), 0
    for name, (data, facts) in made.items():
        begin = round_up(end, _ALIGNMENT)
        end = begin + data.nbytes
        entries[name] = _Entry(begin, end, facts)
    header = msgspec.msgpack.encode(entries)
    begin = round_up(_HEADER_AT + len(header), _PAGE)
    if end < _LEAST_BYTES or begin + end > max_bytes:
        return
    temporary = path.with_suffix(_UNFINISHED)
    try:
        with open(temporary, "ab", opener=_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_unfinished(path.parent)
            disk = os.statvfs(path.parent)
            if disk.f_bavail * disk.f_frsize < 2 * (begin + end):
                raise OSError(f"{path.parent} has less than twice their {begin + end} bytes free")
            _make_room(path.parent, max_bytes - begin - end)
            file.truncate(0)
            pieces = ((begin + entry.begin, made[name][0]) for name, entry in entries.items())
            _write(file.fileno(), header, begin, pieces, library)
            temporary.replace(path)
    except BlockingIOError:
        pass  # another engine is writing it
    except OSError as error:
        log.say(f"engine-core: the packed weights are not kept: {error}")
        with contextlib.suppress(OSError):
            temporary.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _write(fd: int, header: bytes, begin: int, pieces: Iterable[tuple[int, UInt8s]], library: CpuLibrary) -> None:
    """Write the data, which begins at `begin`, then the beginning with the digests. Errors: OSError."""
    for place, piece in _in_pieces(pieces, begin):
        rest, at = piece.data, place
        while rest:
            written = os.pwrite(fd, rest, at)
            rest, at = rest[written:], at + written
    with library.alone():
        digest = digest_of_pieces(library, _mapped(fd, begin, os.fstat(fd).st_size))
    digests = hashlib.sha256(header).digest() + digest
    os.pwrite(fd, _MAGIC + len(header).to_bytes(8, "little") + digests + header, 0)


def _mapped(fd: int, begin: int, end: int) -> Iterator[UInt8s]:
    """Yield the file's bytes from `begin` on, mapped one piece after the other: all of them would count as memory."""
    for place in range(begin, end, _MAPPED):
        yield np.frombuffer(mmap.mmap(fd, min(_MAPPED, end - place), access=mmap.ACCESS_READ, offset=place), np.uint8)


def _in_pieces(pieces: Iterable[tuple[int, UInt8s]], begin: int) -> Iterator[tuple[int, UInt8s]]:
    """Yield pieces of _PIECE bytes, from `begin` on, with these bytes at ascending places: (place, bytes).

    All are in one array, which has the next one's bytes after that.
    The system keeps what is written in whole huge pages in such pages.
    """
    whole, used = np.zeros(_PIECE, np.uint8), 0
    for place, data in pieces:
        done = 0
        while done < data.nbytes:
            if place + done >= begin + _PIECE:
                yield begin, whole
                begin, used = begin + _PIECE, 0
                whole.fill(0)
                continue
            at = place + done - begin
            part = data[done : done + _PIECE - at]
            whole[at : at + len(part)] = part
            done, used = done + len(part), at + len(part)
    yield begin, whole[:used]


def _remove_unfinished(folder: Path) -> None:
    """Remove what engines left that were killed. A file that is being written is locked."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _make_room(folder: Path, num_bytes: int) -> None:
    """Remove the least recently used files until the others have at most num_bytes bytes."""
    found = sorted(((path, path.stat()) for path in folder.glob(f"*{_SUFFIX}")), key=lambda each: each[1].st_mtime_ns)
    total = sum(status.st_size for _, status in found)
    for path, status in found:
        if total <= num_bytes:
            return
        path.unlink(missing_ok=True)
        total -= status.st_size
