"""BlockFolder: KV blocks as files in a folder, shared by several engines and kept over restarts.

The folder is private to its owner (0700, files 0600). A link, or a folder or file of another user, is refused. Names
are digests (core/tiers/portable_names.py), so equal names mean equal bytes, and writers need no lock: a file appears
complete, by a rename. Any problem with a file makes it a miss. It is a KVConnector (core/tiers/connector.py). Not
thread-safe, except for has() and pack(); load() has threads of its own.
"""

import contextlib
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from core.tiers.block_file import BlockToLoad, BlockToStore, is_block
from core.tiers.portable_names import KEY_BYTES
from ipc.errors import ConfigError
from ipc.machine.cpus import usable_cpus

_KEY_FILE = "key"
_BLOCKS = "blocks"
_SUFFIX = ".kv"
_UNFINISHED = ".tmp"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Unfinished files this much older than the last change were left by an engine that has died. In ns.
_UNFINISHED_NS = 600 * 10**9
#: The files are counted again when this engine has written this fraction of the limit since the last count, because
#: other engines write too. If there are too many, enough are removed to leave this fraction free.
_SHARE = 16
_NS_PER_MS = 1_000_000
#: Threads that read blocks, and how many blocks there are for each of them at least.
_MOST_THREADS, _BLOCKS_PER_THREAD = 4, 8
_HELPERS_NICE = 10
#: Blocks that are not written yet and are to be kept then: more are forgotten, oldest first.
MAX_RETAINED = 1 << 16


class _File(NamedTuple):
    used_ns: int  # its modification time, set by each use, or later if it is retained; files are sorted by it
    name: str
    num_bytes: int


class BlockFolder:
    """An open folder with at most about max_bytes bytes of blocks. It is created if it is missing, with its parents.

    key: for the blocks' names and digests; empty: the folder's own.

    Errors: ConfigError that says what is wrong with the folder.
    """

    def __init__(self, path: str, max_bytes: int, key: bytes = b"") -> None:
        self._max_bytes = max_bytes
        try:
            _make_path(path)
            self._fd = os.open(path, _DIRECTORY)
        except OSError as error:
            raise ConfigError(f"kv_dir={path!r} cannot be used: {_reason(error)}") from error
        try:
            self._check(path)
            self.key = self._read_key()
            self._digest_key = key or self.key
            _make_folder(self._fd, _BLOCKS)
            self._blocks = _open_folder(self._fd, _BLOCKS)
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(f"kv_dir={path!r} cannot be used: {_reason(error)}") from error
        except ConfigError:
            os.close(self._fd)
            raise
        self._retained: dict[bytes, int] = {}  # by name: until when to keep a block that has no file yet, unix ns
        self._num_written = 0  # number of files written by this engine
        self.num_bytes = self._new_bytes = 0  # at the last count, and written after it by this engine

    def open(self) -> None:
        """Bring the folder below its limit, which may have been larger before. Errors: OSError."""
        self.make_room()

    def close(self) -> None:
        """Close the folder."""
        os.close(self._blocks)
        os.close(self._fd)

    def has(self, name: bytes) -> bool:
        """Return whether there is a file of this name. It may still turn out to be damaged."""
        try:
            return _is_own_file(os.stat(_file_of(name), dir_fd=self._blocks, follow_symlinks=False))
        except OSError:
            return False

    def find(self, lookup: int, names: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, have files."""
        return next((count for count, name in enumerate(names) if not self.has(name)), len(names))

    def load(self, lookup: int, blocks: Sequence[BlockToLoad]) -> None:
        """Read those of these blocks that have intact files. A damaged file is removed.

        Half of the time is for digests, so many blocks are read by several threads, which take one after the other.
        """
        rest, num_threads = iter(blocks), min(_MOST_THREADS, usable_cpus(), len(blocks) // _BLOCKS_PER_THREAD)
        others = [threading.Thread(target=self._help, args=(rest,), daemon=True) for _ in range(1, num_threads)]
        with contextlib.ExitStack() as joined:
            with contextlib.suppress(RuntimeError):  # of the system: fewer threads are enough
                for thread in others:
                    thread.start()
                    joined.callback(thread.join)
            self._read_all(rest)

    def _help(self, rest: Iterator[BlockToLoad]) -> None:
        with contextlib.suppress(OSError):  # steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _HELPERS_NICE)
        self._read_all(rest)

    def _read_all(self, rest: Iterator[BlockToLoad]) -> None:
        for block in rest:
            self._read(block)

    def _read(self, block: BlockToLoad) -> None:
        file = _file_of(block.name)
        try:
            fd = os.open(file, _FILE, dir_fd=self._blocks)
        except OSError:
            return
        try:
            if not _is_own_file(os.fstat(fd)):
                return
            if block.read_from(fd):
                with contextlib.suppress(OSError):
                    _touch(fd)
                return
            os.unlink(file, dir_fd=self._blocks)
        except OSError:
            return
        finally:
            os.close(fd)

    def pack(self, name: bytes) -> bytearray | None:
        """Return the bytes of a block's file, or None if there is no intact one. Errors: OSError."""
        try:
            fd = os.open(_file_of(name), _FILE, dir_fd=self._blocks)
        except OSError:
            return None
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            data = bytearray(file.read(found.st_size)) if _is_own_file(found) else bytearray()
        return data if is_block(memoryview(data), name, self._digest_key) else None

    def store(self, block: BlockToStore) -> bool:
        """Write a block unless there is a file of it. Return whether it was written. Errors: OSError."""
        file, size = _file_of(block.name), block.num_bytes
        with contextlib.suppress(FileNotFoundError):
            _touch(file, self._blocks)
            return False
        if size > self._max_bytes:
            return False
        self._num_written += 1
        new = f"{os.getpid()}-{self._num_written}-{secrets.token_hex(4)}{_UNFINISHED}"
        fd = os.open(new, _NEW_FILE, 0o600, dir_fd=self._blocks)
        try:
            try:
                block.write_to(fd)
            finally:
                os.close(fd)
            if not block.is_unchanged():
                os.unlink(new, dir_fd=self._blocks)
                return False
            if until_ns := self._retained.pop(block.name, 0):
                _mark(new, self._blocks, until_ns)
            os.rename(new, file, src_dir_fd=self._blocks, dst_dir_fd=self._blocks)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=self._blocks)
            raise
        self._new_bytes += size
        if self._new_bytes * _SHARE > self._max_bytes or self.num_bytes + self._new_bytes > self._max_bytes:
            self.make_room()
        return True

    def retain(self, names: Sequence[bytes], ttl_ms: int) -> None:
        """Keep blocks for a time from now on; 0 = no longer. Those without a file are kept once they have one.

        A file's modification time is then in the future. So files are removed in this order: unused ones, the least
        recently used first; then those that are to be kept, the one that may go first before others. Other engines and
        later ones see it too.
        """
        until_ns = time.time_ns() + ttl_ms * _NS_PER_MS
        for name in names:
            self._retained.pop(name, None)
            with contextlib.suppress(FileNotFoundError):
                _mark(_file_of(name), self._blocks, until_ns)
                continue
            if ttl_ms:
                self._retained[name] = until_ns
        while len(self._retained) > MAX_RETAINED:
            del self._retained[next(iter(self._retained))]

    def make_room(self) -> None:
        """Count the files of all engines. If there are too many, remove those that were unused for the longest time."""
        files = sorted(self._files())
        self.num_bytes, self._new_bytes = sum(file.num_bytes for file in files), 0
        if self.num_bytes <= self._max_bytes:
            return
        for file in files:
            if self.num_bytes <= self._max_bytes - self._max_bytes // _SHARE:
                break
            with contextlib.suppress(FileNotFoundError):  # another engine was faster
                os.unlink(file.name, dir_fd=self._blocks)
            self.num_bytes -= file.num_bytes

    def _files(self) -> Iterator[_File]:
        """Yield all blocks, and remove unfinished files of dead engines."""
        oldest_ns = os.fstat(self._blocks).st_mtime_ns - _UNFINISHED_NS  # something was written later
        with os.scandir(self._blocks) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it is gone
                    found = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(_SUFFIX):
                        yield _File(found.st_mtime_ns, entry.name, found.st_size)
                    elif entry.name.endswith(_UNFINISHED) and found.st_mtime_ns < oldest_ns:
                        os.unlink(entry.name, dir_fd=self._blocks)

    def _check(self, path: str) -> None:
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid():
            raise ConfigError(f"kv_dir={path!r} belongs to user {found.st_uid}, but the engine is {os.geteuid()}")
        if found.st_mode & 0o077:
            raise ConfigError(
                f"kv_dir={path!r} is accessible to others (mode {found.st_mode & 0o777:o}), who could work out prompts "
                f"from its files: chmod 700 {path}"
            )

    def _read_key(self) -> bytes:
        """Return the folder's secret, which its first engine creates. Errors: OSError, ConfigError."""
        with contextlib.suppress(FileExistsError):
            self._write_key()
        fd = os.open(_KEY_FILE, _FILE, dir_fd=self._fd)
        try:
            is_own, key = _is_own_file(os.fstat(fd)), os.read(fd, KEY_BYTES + 1)
        finally:
            os.close(fd)
        if not is_own or len(key) != KEY_BYTES:
            raise ConfigError(f"the file {_KEY_FILE!r} in kv_dir was not created by an engine: remove the folder")
        return key

    def _write_key(self) -> None:
        """Create the secret under another name first, so that it appears complete. Errors: FileExistsError, OSError."""
        name = f"{_KEY_FILE}-{secrets.token_hex(8)}{_UNFINISHED}"
        fd = os.open(name, _NEW_FILE, 0o600, dir_fd=self._fd)
        try:
            try:
                os.write(fd, secrets.token_bytes(KEY_BYTES))
                os.fsync(fd)
            finally:
                os.close(fd)
            # unlike a rename, it never replaces a file
            os.link(name, _KEY_FILE, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        finally:
            os.unlink(name, dir_fd=self._fd)


def _touch(file: str | int, folder: int | None = None) -> None:
    """Mark a file as used now, unless it is retained. Errors: OSError."""
    now, follows = time.time_ns(), folder is None  # a link in a folder is not followed
    if os.stat(file, dir_fd=folder, follow_symlinks=follows).st_mtime_ns <= now:
        os.utime(file, ns=(now, now), dir_fd=folder, follow_symlinks=follows)


def _mark(file: str, folder: int, used_ns: int) -> None:
    """Set the time at which a file counts as used. Errors: OSError."""
    os.utime(file, ns=(used_ns, used_ns), dir_fd=folder, follow_symlinks=False)


def _file_of(name: bytes) -> str:
    return name.hex() + _SUFFIX


def _make_path(path: str) -> None:
    """Create a folder and its missing parents, all private to their owner. Errors: OSError."""
    missing, folder = [path], os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def _make_folder(parent: int, name: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)


def _open_folder(parent: int, name: str) -> int:
    """Open a folder owned by this user. Errors: OSError."""
    fd = os.open(name, _DIRECTORY, dir_fd=parent)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(fd)
        raise PermissionError(errno.EPERM, f"{name!r} in it belongs to another user, or is accessible to others")
    return fd


def _is_own_file(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _reason(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return "it is a link or not a folder; give the folder itself"
    return error.strerror or str(error)
