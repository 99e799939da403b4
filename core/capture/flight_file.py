"""The file of a flight recorder: the records of a ring (ipc/records/flight_ring.py) as a capture, redacted or complete.

Without --flight-recorder-contents no prompt is written to disk: the ring's records become a capture in memory, and only
its redaction (core/capture/redaction.py) is written. Until the file is complete it is named FILE.part.
"""

import os
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from core.capture.file import CaptureFile
from core.capture.output import open_capture
from core.capture.packed_steps import unpack_steps
from core.capture.records import TAGS, Checkpoint, Header, Step, decode_config, decode_record
from core.capture.redaction import redact
from ipc.errors import CaptureFileError, ConfigError
from ipc.machine.memory_files import make_memory_file
from ipc.records.flight_ring import Half
from ipc.records.log_frames import Frame, pack_frame, read_frames

KEPT_FILES = 20  # newest files kept in a folder
_OURS = re.compile(r"engine-\d{8}T\d{6}-\d+\.cap")
_NS = 1e9


class FlightWritten(NamedTuple):
    """A file that was written."""

    path: Path
    num_steps: int
    seconds: float  # time from its first step to its last
    is_redacted: bool


def write_flight(halves: Sequence[Half], pid: int, path: str | None = None) -> FlightWritten | None:
    """Write a ring's records to a new file. Return None if there is no step in them.

    pid: of the engine, for the file's name. path: the file; None = one in the folder named by the engine's options, in
    which KEPT_FILES are kept. Errors: CaptureFileError for a state or requests whose content cannot be removed;
    ConfigError, OSError for a file that cannot be written.
    """
    frames = [list(unpack_steps(read_frames(half.data))) for half in halves]
    header = next((decode_record(one[0].tag, one[0].payload) for one in frames if one), None)
    if not isinstance(header, Header) or not any(frame.tag == TAGS[Step] for one in frames for frame in one):
        return None
    config = decode_config(header)
    target = Path(path) if path is not None else _new_path(config.flight_recorder_folder, pid)
    error: CaptureFileError | None = None
    for some in (frames, frames[-1:]):  # if the whole cannot be redacted, its last part may be
        with _MemoryFile(_as_capture(some)) as memory:
            try:
                file = CaptureFile(memory.path, config.scheduler_cls)
                if not file.num_steps:
                    continue
                _write(file, target, memory.data if config.flight_recorder_contents else None)
            except CaptureFileError as one:
                error = error or one
                continue
            times = [turn.step.now_ns for turn in file.turns()]
            _remove_old(target.parent if path is None else None)
            seconds = (times[-1] - times[0]) / _NS
            return FlightWritten(target, len(times), seconds, not config.flight_recorder_contents)
    assert error is not None, "a ring with steps of which no part was tried"
    raise error


def flight_folder(folder: str | None) -> Path:
    """Return the folder for flight recorder files: the given one, or this user's default."""
    if folder is not None:
        return Path(folder)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "engine-core"


def _as_capture(halves: Sequence[Sequence[Frame]]) -> bytes:
    """Return the frames of one or two halves, older first, as the bytes of one capture.

    Both halves have the records from the newer one's checkpoint to the moment it took over. If any record between the
    halves is missing, only the newer one is used.
    """
    if len(halves) == 2 and halves[0] and halves[1]:
        older, newer = halves
        checkpoint = newer[1]
        if older[-1].sequence >= checkpoint.sequence:
            before = [frame for frame in older if frame.sequence <= checkpoint.sequence]
            return _framed([*before, *newer[1:]])
        return _framed(newer)
    return _framed(halves[-1])


def _framed(frames: Sequence[Frame]) -> bytes:
    """Return consecutive frames, up to the first missing one, with new sequence numbers."""
    kept = list(frames[:1])
    for before, frame in pairwise(frames):
        if before.offset and frame.tag != TAGS[Checkpoint] and frame.sequence != before.sequence + 1:
            break
        kept.append(frame)
    return b"".join(pack_frame(number, frame.tag, frame.payload) for number, frame in enumerate(kept))


def _new_path(folder: str | None, pid: int) -> Path:
    """Return the path of a new file in an existing folder. Errors: ConfigError."""
    home = flight_folder(folder)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"flight_recorder_folder={str(home)!r} cannot be created: {error.strerror}") from None
    now = int(time.time())
    while True:
        path = home / time.strftime(f"engine-%Y%m%dT%H%M%S-{pid}.cap", time.gmtime(now))
        if not path.exists():
            return path
        now += 1


def _write(file: CaptureFile, target: Path, contents: bytes | None) -> None:
    """Write a capture, or its redaction, under a temporary name first."""
    part = target.with_name(f"{target.name}.part")
    if target.exists():
        raise ConfigError(f"{target} already exists and is never overwritten: choose another name")
    try:
        if contents is None:
            redact(file, str(part))
        else:
            with os.fdopen(open_capture(str(part)), "wb") as out:
                out.write(contents)
        os.rename(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _remove_old(folder: Path | None) -> None:
    """Remove all but the newest files of a folder; None: do nothing."""
    found = [] if folder is None else sorted(path for path in folder.iterdir() if _OURS.fullmatch(path.name))
    for path in found[:-KEPT_FILES]:
        path.unlink(missing_ok=True)


class _MemoryFile:
    """Bytes in memory with the interface of a file with a path."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._fd = make_memory_file("engine-core-flight-file", len(data))
        self.path = f"/proc/self/fd/{self._fd}"
        with open(self._fd, "wb", closefd=False) as out:
            out.write(data)

    def __enter__(self) -> "_MemoryFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
