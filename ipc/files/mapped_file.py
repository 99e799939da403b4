"""Map a regular file into memory, or raise a ModelFileError that states why it cannot be mapped."""

import mmap
import stat
from pathlib import Path

from ipc.errors import ModelFileError

#: First bytes of a pointer file, and a size above that of any (git-lfs's specification).
_POINTER, _MAX_POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024


def map_file(path: Path, access: int = mmap.ACCESS_READ) -> mmap.mmap:
    """Map the whole file. access=mmap.ACCESS_COPY gives a private writable mapping, which copies only the written
    pages.

    Errors: ModelFileError if the path is missing, unreadable, empty, not a regular file (a FIFO would block), or a
    pointer that git-lfs has not replaced yet.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: expected a regular file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: the file is empty")
        with path.open("rb") as file:
            if status.st_size < _MAX_POINTER_BYTES and file.read(len(_POINTER)) == _POINTER:
                raise ModelFileError(
                    f"{path}: this is a git-lfs pointer, not the file itself: run `git lfs pull` in its folder"
                )
            return mmap.mmap(file.fileno(), 0, access=access)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from None
