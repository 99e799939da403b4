"""A capture of this engine as a trace: arrivals, lengths, and which prompts begin alike."""

from pathlib import Path

from core.capture.file import CaptureFile
from ipc.wire.messages import AddRequest
from tools.commands.replay.what_if.foreign import read_requests
from tools.commands.replay.what_if.recording import Recorded
from tools.lab.traces.row import Row

BLOCK = 16  # prompt tokens that one id stands for


def read_capture(path: Path, num_rows: int | None) -> list[Row]:
    """Return the capture's requests; of one with several choices, the first. Errors: CaptureFileError."""
    ids: dict[tuple[int, bytes], int] = {}  # by the block before and the block's tokens

    def hash_ids(prompt: bytes) -> tuple[int, ...]:
        found, before = [], -1
        for at in range(0, len(prompt), 4 * BLOCK):
            before = ids.setdefault((before, prompt[at : at + 4 * BLOCK]), len(ids))
            found.append(before)
        return tuple(found)

    return [
        Row(
            one.received_ns / 1e9,
            len(one.message.prompt_token_ids) // 4,
            len(one.tokens[0]) or _wanted(one),
            hash_ids(one.message.prompt_token_ids),
        )
        for one in read_requests(CaptureFile(path))[:num_rows]
    ]


def _wanted(one: Recorded) -> int:
    """Return the tokens that a request asked for, where it has none yet; a pooling request has none."""
    return (one.message.params.max_tokens or 1) if isinstance(one.message, AddRequest) else 1
